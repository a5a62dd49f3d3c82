"""Statements of the tutorial in docs/tutorial.md: the model, and what it needs in memory.

Statements that hold are reproduced; where the tutorial is wrong or loose the precise value comes from the product and
the tutorial's own arithmetic is kept beside it to show the difference.
"""

from __future__ import annotations

import pytest

from planner.catalog import load_accelerator
from planner.cost.params import (
    active_params,
    embedding_params,
    head_params,
    layer_matrices,
    layer_params,
    mtp_params,
    other_params,
    total_params,
)
from planner.specs.model import ModelSpec
from planner.units import GB, GIB
from tests.reference.tutorial import (
    SEVEN_B,
    activations_gb,
    model_states_gb,
    spec,
    states_per_param,
    tutorial_activations_gb,
)
from tests.strategies import estimated, machines, names, question, step_of, under
from tests.unit.test_pipeline import closed_form

# --- 1. Model basics


def test_item_01_ffn_matrices() -> None:
    """Plain models have two FFN matrices of width 4h; the Llama class has three of 2.7 to 3.5 h."""
    gpt, llama, large = spec("gpt3-175b"), spec(SEVEN_B), spec("llama-3-70b")
    plain = [m for m in layer_matrices(gpt, ("attention", "dense")) if m.part == "mlp"]
    gated = [m for m in layer_matrices(llama, ("attention", "dense")) if m.part == "mlp"]
    assert (len(plain), len(gated)) == (2, 3)
    assert sum(m.size for m in plain) == 8 * gpt.hidden**2
    assert 2.6 < llama.ffn / llama.hidden < large.ffn / large.hidden <= 3.5


@pytest.mark.parametrize("model", [SEVEN_B, "llama-3.2-1b", "gpt2-124m"])
def test_item_02_embedding_layers_head(model: str) -> None:
    """A model is its embedding, its layers, its head (nothing when tied) and the final norm."""
    parts = spec(model)
    layers = sum(layer_params(parts, kind).total for kind in parts.layer_kinds())
    assert total_params(parts) == embedding_params(parts) + layers + head_params(parts) + other_params(parts)
    assert (head_params(parts) == 0) == parts.tied


def cached_width(model: ModelSpec) -> int:
    """Elements a token leaves in the key/value cache of one layer, read off the weight matrices."""
    matrices = {m.name: m for m in layer_matrices(model, model.layer_kinds()[0])}
    return matrices["kv_down"].outputs if "kv_down" in matrices else matrices["k"].outputs + matrices["v"].outputs


def test_item_03_key_value_cache() -> None:
    """MHA 2 n d, GQA g/n of it, MQA 1/n of it; latent attention keeps the rank and the rotary part, 512 + 64."""
    mha, gqa, mqa = spec(SEVEN_B), spec("llama-2-70b"), spec("falcon-7b")
    assert cached_width(mha) == 2 * mha.heads * mha.head_dim
    assert cached_width(gqa) * 8 == 2 * gqa.heads * gqa.head_dim
    assert cached_width(mqa) * mqa.heads == 2 * mqa.heads * mqa.head_dim
    assert cached_width(spec("deepseek-v3")) == 512 + 64


@pytest.mark.parametrize("model", ["llama-2-70b", "mistral-7b"])
def test_item_04_grouped_query_models(model: str) -> None:
    """Both named models have eight key/value heads."""
    assert (spec(model).kv_heads, spec(model).attention) == (8, "gqa")


def test_item_05_mixture_of_experts() -> None:
    """Eight experts hold eight FFNs; a token visits two, which cost twice one, not about one."""
    mixtral = spec("mixtral-8x7b")
    layer = layer_params(mixtral, ("attention", "moe"))
    one_ffn = 3 * mixtral.hidden * (mixtral.moe.expert_ffn if mixtral.moe else 0)
    assert layer.experts * layer.expert_sharded_one == 8 * one_ffn
    assert layer.top_k * layer.expert_sharded_one == 2 * one_ffn
    assert total_params(mixtral) / GB == pytest.approx(46.7, abs=0.05)
    assert active_params(mixtral) / GB == pytest.approx(12.9, abs=0.05)


def test_item_06_deepseek_v3() -> None:
    """256 routed experts, 8 visited, one shared, three dense layers first: 671B, 37B active; prediction block apart."""
    model = spec("deepseek-v3")
    assert model.moe is not None
    assert (model.moe.experts, model.moe.top_k, model.moe.dense_first) == (256, 8, 3)
    assert model.moe.shared_ffn == model.moe.expert_ffn
    assert total_params(model) / GB == pytest.approx(671, abs=0.5)
    assert active_params(model) / GB == pytest.approx(37.5, abs=0.6)
    # The released block of 14B holds its own embedding and head; in training they are shared.
    released = mtp_params(model) + 2 * embedding_params(model)
    assert released / GB == pytest.approx(13.5, abs=0.6)


# --- 2. Memory


def test_item_07_fp32_states() -> None:
    """fp32 with Adam: 4 + 4 + 8 = 16 bytes a parameter."""
    assert states_per_param("megatron", 0, precision="fp32") == {
        "weights": 4.0, "gradients": 4.0, "optimizer": 8.0, "total": 16.0
    }  # fmt: skip


def test_item_08_mixed_precision_states() -> None:
    """2 + 2 + 12 = 16 with 16-bit gradients; Megatron keeps fp32 gradients, 18; FSDP's fp32 parameters make 16."""
    assert states_per_param("deepspeed", 0)["total"] == 16.0
    assert states_per_param("megatron", 0)["total"] == 18.0
    fsdp = states_per_param("fsdp", 3, 1)
    assert fsdp["total"] == 16.0


@pytest.mark.parametrize(
    ("model", "billions", "tutorial_gb", "sixteen", "eighteen"),
    [(SEVEN_B, 7, 112, 107.8, 121), ("llama-2-13b", 13, 208, 208, 234), ("llama-2-70b", 70, 1120, 1104, 1242)],
)
def test_item_09_states_of_real_models(
    model: str, billions: int, tutorial_gb: float, sixteen: float, eighteen: float
) -> None:
    """16 bytes times the nominal size is the tutorial's figure; real counts and 18 bytes give the precise ones."""
    assert states_per_param("deepspeed", 0)["total"] * billions == tutorial_gb
    assert model_states_gb(model, "deepspeed") == pytest.approx(sixteen, rel=0.005)
    assert model_states_gb(model, "megatron") == pytest.approx(eighteen, rel=0.005)


@pytest.mark.parametrize(
    ("model", "tutorial_gb", "precise_gb"), [(SEVEN_B, 8, 8.6), ("llama-2-13b", 15, 13.5), ("llama-2-70b", 80, 45.0)]
)
def test_item_10_activations(model: str, tutorial_gb: float, precise_gb: float) -> None:
    """Flash attention, no recomputation: 8.6, 13.5 and 45 GB; the 70B figure ignores grouped-query attention."""
    computed = activations_gb(model)
    assert computed == pytest.approx(precise_gb, rel=0.02)
    close = abs(tutorial_gb / computed - 1.0) < 0.15
    assert close == (model != "llama-2-70b")


def test_item_10_logits_and_scores() -> None:
    """Logits add 0.4 GB or more (fusing saves passes, not bytes); materialised scores add 21 GB to the 7B model,
    without dropout (as in written commands) two fifths of it."""
    fused = step_of(question(SEVEN_B, machines("h100", 1), global_batch=1))
    eager = step_of(question(SEVEN_B, machines("h100", 1), global_batch=1, loss="eager"))
    assert 0.4 < eager.loss_transient[0] / GB < fused.loss_transient[0] / GB < 0.8
    added = activations_gb(SEVEN_B, flash_attention=False) - activations_gb(SEVEN_B)
    assert added == pytest.approx(21.3 * 2 / 5, rel=0.02)


@pytest.mark.parametrize(("model", "factor"), [(SEVEN_B, 3.8), ("llama-2-13b", 3.8), ("llama-2-70b", 3.5)])
def test_item_11_activation_formula(model: str, factor: float) -> None:
    """The tutorial's formula is three to four times short of what a layer saves (and of its own table)."""
    assert activations_gb(model) / tutorial_activations_gb(spec(model)) == pytest.approx(factor, rel=0.05)
    if model == SEVEN_B:
        assert tutorial_activations_gb(spec(model)) == pytest.approx(2.25, abs=0.01)


def test_item_12_two_cards_for_7b() -> None:
    """Two 80 GB cards hold 7B when states are sharded or the model is split, not when they are replicated."""
    two = machines("a100", 2)
    assert not estimated(question(SEVEN_B, two, global_batch=2)).fits
    assert not estimated(question(SEVEN_B, two, "deepspeed", global_batch=2)).fits
    assert estimated(question(SEVEN_B, two, "fsdp", global_batch=2), zero_stage=3).fits
    assert estimated(question(SEVEN_B, two, global_batch=2), tp=2, sequence_parallel=True).fits
    assert estimated(question(SEVEN_B, two, global_batch=2), pp=2).fits


def test_item_13_sixteen_cards_for_70b() -> None:
    """States alone fill 13.8 cards; with working set and activations 16 are at the edge and 24 comfortable."""
    card = load_accelerator("a100").memory
    assert model_states_gb("llama-2-70b", "deepspeed") / (card.advertised_bytes / GB) == pytest.approx(13.8, abs=0.05)
    peaks = {
        gpus: estimated(
            question("llama-2-70b", machines("a100", gpus), "fsdp", global_batch=gpus), zero_stage=3, recompute="full"
        )
        for gpus in (16, 24, 32)
    }
    assert 0.9 < peaks[16].peak_memory_bytes / card.allocatable_bytes < 1.1
    assert peaks[24].fits
    assert peaks[32].peak_memory_bytes < 0.7 * card.allocatable_bytes


def test_item_14_what_activations_depend_on() -> None:
    """Batch, sequence, hidden and layers; also heads, recomputation, splitting, micro-batches in flight."""

    def saved(seq_len: int = 2048, flash: bool = True, **columns: int | bool) -> float:
        context = question(SEVEN_B, machines("h100", 8), seq_len=seq_len, flash_attention=flash)
        return float(step_of(context, **columns).activation_bytes[0, 0])

    assert saved(micro_batch=2) == pytest.approx(2 * saved())
    assert saved(seq_len=4096) == pytest.approx(2 * saved())
    assert saved(seq_len=4096, flash=False) > 2.5 * saved(flash=False)
    assert saved(tp=8, sequence_parallel=True) == pytest.approx(saved() / 8)
    assert saved(tp=8) > 2 * saved(tp=8, sequence_parallel=True)
    assert closed_form("1f1b", 4, 8, [4] * 4).in_flight == [4.0, 3.0, 2.0, 1.0]


def test_item_15_what_the_tutorial_leaves_out() -> None:
    """Logits, context, communication buffers, working buffers and fragmentation stand in every memory tree."""
    job = {"seq_len": 8192, "global_batch": 16}
    found = {}
    for backend in ("megatron", "deepspeed", "fsdp"):
        memory = estimated(question("llama-3-8b", machines("h100", 8), backend, **job), micro_batch=2).memory
        for name in ("logits and loss", "context and communication buffers", "fragmentation"):
            assert under(memory, name) > 0.0, (backend, name)
        found[backend] = memory
    assert "dummy weight gradients" in names(found["megatron"])
    logits = {name: under(memory, "logits and loss") / GB for name, memory in found.items()}
    assert 20 < logits["megatron"] < 22 < logits["fsdp"] < logits["deepspeed"] < 31
    phase = found["megatron"].children[0].children[0]
    overhead = under(phase, "context and communication buffers")
    assert 1.0 * GIB < overhead < 4.0 * GIB
    assert 0.03 < under(phase, "fragmentation") / (phase.value - overhead) < 0.10
