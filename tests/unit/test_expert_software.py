"""How a measured mixture of experts was run: what the record says, what its recipe sets, what its age implies."""

from __future__ import annotations

from typing import Any

import pytest

from planner.accuracy.runs.architecture import model_of
from planner.accuracy.runs.expert_software import balanced, expert_habits, generation, graphs_of, padded
from planner.accuracy.runs.interpret import interpret
from planner.accuracy.runs.stack import stack_of
from planner.specs.measurement import MeasuredConfiguration, MeasuredModel, MeasuredRun
from tests.strategies import machines

BRIDGE = "megatron-bridge"


def run(framework: str = BRIDGE, *, container: str | None = None, **fields: Any) -> MeasuredConfiguration:
    extra = {**({} if container is None else {"container": container}), **fields.pop("extra", {})}
    return MeasuredConfiguration(framework=framework, extra=extra, **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"container": "nemo:26.02.01", "version": "v0.3.1"}, (26, 2)),
        ({"version": "v25.05.02"}, (25, 5)),
        ({"version": "v0.3.1"}, None),
    ],
)
def test_generation(fields: dict[str, Any], expected: tuple[int, int] | None) -> None:
    assert generation(run(**fields)) == expected


@pytest.mark.parametrize(
    ("configuration", "accelerator", "expected"),
    [
        (run("megatron-lm", extra={"dispatcher": "alltoall"}), "gb200", "all-to-all"),
        (run("megatron-lm", extra={"dispatcher": "hybridep"}), "h100", "flex"),
        (run("megatron-lm"), "h100", "all-to-all"),
        (run(extra={"recipe": {"moe_flex_dispatcher_backend": "deepep"}}), "h100", "flex"),
        (run(extra={"recipe_settings": {"model.moe_flex_dispatcher_backend": '"hybridep"'}}), "gb200", "flex"),
        (run(extra={"recipe": {"match": "exact"}}), "gb200", "all-to-all"),
        (run(container="nemo:25.11"), "gb200", "flex"),
        (run(container="nemo:25.09"), "gb200", "flex-between-domains"),
        (run(container="nemo:25.11"), "h100", "flex-between-domains"),
    ],
)
def test_dispatcher(configuration: MeasuredConfiguration, accelerator: str, expected: str) -> None:
    """The record's word, then the recipe's backend (none: all-to-all), then what recipes of that age used."""
    assert expert_habits(configuration, machines(accelerator, 64))["expert_dispatch"] == expected


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        (run(pp=8, vpp=1, extra={"ep_overlap_1f1b": True}), False),
        (run(pp=8, vpp=3, extra={"ep_overlap_1f1b": True}), True),
        (run(pp=1, extra={"recipe": {"moe_a2a_overlap": True}}), True),
        (run(pp=8, vpp=3, cuda_graphs="full_iteration:"), True),
        (run(pp=8, vpp=3, cuda_graphs="full_iteration:", extra={"ep_overlap_1f1b": False}), False),
        (run(pp=8, vpp=3, container="nemo:25.11"), False),
        (run("megascale-moe", pp=8, vpp=1), True),
    ],
)
def test_expert_overlap(configuration: MeasuredConfiguration, expected: bool) -> None:
    """It needs one stage or several chunks, and came with whole-iteration graphs in every recipe."""
    assert expert_habits(configuration, machines("gb200", 64))["expert_overlap"] is expected


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        (run(cuda_graphs="none"), "none"),
        (run(cuda_graphs="transformer_engine:attn+moe_router+moe_preprocess"), "partial"),
        (run(cuda_graphs="local:full_iteration"), "full"),
        (run(container="nemo:25.11"), "partial"),
        (run("megatron-lm"), "none"),
    ],
)
def test_graphs(configuration: MeasuredConfiguration, expected: str) -> None:
    assert graphs_of(configuration, machines("gb200", 64)) == expected


def test_padded_experts() -> None:
    """A capacity is stated, or the recipes of that age set one."""
    assert padded(run("nemo", extra={"moe_routing": "capacity factor 1.0, padded (token drop)"}))
    assert padded(run(container="nemo:25.09", extra={"moe_routing": "forced balance, dropless"}))
    assert not padded(run(container="nemo:25.11", extra={"moe_routing": "forced balance, dropless"}))
    assert not padded(run("megatron-lm"))
    assert padded(run("nemo"))
    assert not padded(run("nemo"), latent_attention=True)


def test_balanced_routing() -> None:
    """Benchmarks force balance; fine-tuning and verification runs do not, unless the record says so."""
    assert balanced(run())
    assert not balanced(run(extra={"tuned": False}))
    assert not balanced(run(extra={"task": "sft"}))
    assert balanced(run(extra={"task": "sft", "force_balance": True}))
    assert not balanced(run(extra={"force_balance": False}))


def record(model: dict[str, Any], **configuration: Any) -> MeasuredRun:
    return MeasuredRun.model_validate(
        {
            "id": "made/up",
            "model": {"vocab": 151_936, "seq_len": 4096, "gated_mlp": True, **model},
            "hardware": {"gpu": "h100-80gb-sxm", "gpus": 256},
            "run": {"framework": "megatron-lm", "precision": "bf16", "dp": None, "global_batch": 2048, **configuration},
        }
    )


QWEN = {
    "name": "qwen3-235b-a22b",
    "layers": 94,
    "hidden": 4096,
    "heads": 64,
    "kv_heads": 4,
    "head_dim": 128,
    "moe": {"experts": 128, "top_k": 8, "expert_ffn": 1536, "shared_ffn": 0, "moe_layers": 94},
}


def test_chunks_of_embedding_and_loss() -> None:
    """94 layers in 32 x 3 chunks: the first and the last hold embedding and loss only."""
    case = interpret(record(QWEN, tp=1, pp=32, vpp=3, cp=1, ep=8, micro_batch=1, recompute="none"))
    layers = case.batch.stage_layers[0].tolist()
    assert (layers[0], layers[-1], sum(layers), max(layers)) == (0, 0, 94, 1)


@pytest.mark.parametrize(
    ("framework", "ep", "expected"), [("megatron-lm", 8, 4), ("torchtitan", 8, 1), ("megatron-lm", 64, 1)]
)
def test_unstated_expert_tensor_parallelism(framework: str, ep: int, expected: int) -> None:
    """Megatron's default is that of dense matrices; 64 ranks of a stage hold no 64 x 4 expert groups."""
    case = interpret(record(QWEN, framework=framework, tp=4, pp=4, cp=1, ep=ep, micro_batch=1))
    assert case.batch.etp.tolist() == [expected] * len(case.batch)


def test_a_named_dispatcher_means_expert_parallelism() -> None:
    """Without its degree: as many ranks as the fast links reach."""
    layout: dict[str, Any] = {"tp": 1, "pp": 8, "cp": 1, "ep": None, "micro_batch": 1}
    case = interpret(record(QWEN, **layout, extra={"dispatcher": "deepep"}))
    assert set(case.batch.ep.tolist()) == {8}
    assert "ep 8 (not stated)" in case.assumed
    assert set(interpret(record(QWEN, **layout)).batch.ep.tolist()) == {1}


def test_open_recomputation_offers_modules() -> None:
    """Nothing said of a mixture's recomputation: selective modules are tried before whole layers."""
    case = interpret(record(QWEN, tp=2, pp=8, vpp=1, cp=1, ep=8, micro_batch=1))
    kinds = {kind.id for kind in case.context.recompute_kinds}
    assert {"none", "moe_act", "moe", "full"} <= kinds


def test_mixtures_run_without_tensor_parallel_overlap() -> None:
    """Recipes of dense models overlap tensor-parallel traffic, those of mixtures leave it off."""
    mixture = record(QWEN, framework=BRIDGE, tp=2, pp=8)
    dense = record({**QWEN, "name": "dense", "moe": None, "ffn": 12_288}, framework=BRIDGE, tp=2, pp=8)
    overlaps = [
        stack_of(case, machines("h100", 256), "bf16")[0].habits.tensor_parallel_overlap for case in (mixture, dense)
    ]
    assert overlaps == [False, True]


def test_unstated_features_come_from_the_catalogue() -> None:
    """Nobody writes down the biases, windows and sinks of gpt-oss."""
    stated: dict[str, Any] = {
        "name": "gpt-oss-120b",
        "layers": 36,
        "hidden": 2880,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "vocab": 201_088,
        "moe": {"experts": 128, "top_k": 4, "expert_ffn": 2880, "moe_layers": 36},
    }
    spec, _ = model_of(MeasuredModel(seq_len=4096, gated_mlp=True, **stated))
    assert spec.bias.mlp
    assert spec.sinks
    assert spec.window is not None


def test_prediction_blocks_of_the_run() -> None:
    """A hybrid from the catalogue keeps the blocks that the record trained."""
    spec, _ = model_of(MeasuredModel(name="nemotron-3-super-120b-a12b", seq_len=8192, mtp_layers=2))
    assert spec.mtp_layers == 2
