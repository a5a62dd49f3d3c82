"""Parameter counts: against released checkpoints, against counts done by hand, and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from planner.catalog import load_model, model_ids
from planner.cost.params import (
    active_conventions,
    distinct_kinds,
    embedding_params,
    head_params,
    kind_indices,
    layer_matrices,
    layer_params,
    matmul_params_per_token,
    mtp_params,
    other_params,
    padded_vocab,
    total_params,
)
from planner.specs.model import BiasSpec, ModelSpec

TINY = ModelSpec(name="tiny", layers=2, hidden=8, ffn=16, heads=4, kv_heads=2, head_dim=2, vocab=10, max_seq=32)


def test_tiny_model_by_hand() -> None:
    """A two-layer model small enough to count on paper."""
    layer = layer_params(TINY, ("attention", "dense"))
    assert layer.attention_sharded == 8 * 8 + 2 * 8 * 4 + 8 * 8
    assert layer.mlp_sharded == 3 * 8 * 16
    assert layer.norms == 2 * 8
    assert total_params(TINY) == 2 * layer.total + 2 * 10 * 8 + 8
    assert matmul_params_per_token(TINY) == 2 * (192 + 384) + 80


def test_bias_of_row_split_matrices_is_replicated() -> None:
    """Column biases are split with their outputs; the bias added after the reduction is held whole."""
    model = TINY.model_copy(update={"bias": BiasSpec(qkv=True, out=True, mlp=True)})
    plain, layer = layer_params(TINY, ("attention", "dense")), layer_params(model, ("attention", "dense"))
    assert layer.attention_sharded - plain.attention_sharded == 8 + 4 + 4
    assert layer.attention_replicated == 8
    assert layer.mlp_sharded - plain.mlp_sharded == 2 * 16
    assert layer.mlp_replicated == 8


def test_tied_head_adds_nothing_but_is_multiplied() -> None:
    """A tied head is no extra parameter, yet every token is multiplied with it."""
    tied = TINY.model_copy(update={"tied": True})
    assert head_params(tied) == 0
    assert total_params(TINY) - total_params(tied) == embedding_params(TINY)
    assert matmul_params_per_token(tied) == matmul_params_per_token(TINY)


def test_latent_attention_of_deepseek_v3() -> None:
    """Down-projections and their norms are replicated, up-projections split (dimensions of arXiv 2412.19437)."""
    layer = layer_params(load_model("deepseek-v3").spec, ("mla", "moe"))
    assert layer.attention_replicated == 7168 * 1536 + 7168 * (512 + 64) + 1536 + 512
    assert layer.attention_sharded == 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert layer.expert_sharded_one == 3 * 7168 * 2048
    assert layer.router == 7168 * 256 + 256


def test_full_query_projection_without_lora() -> None:
    """DeepSeek-V2-Lite has no query down-projection: the whole query matrix is split."""
    layer = layer_params(load_model("deepseek-v2-lite").spec, ("mla", "dense"))
    assert layer.attention_replicated == 2048 * (512 + 64) + 512


def test_prediction_block_of_deepseek_v3() -> None:
    """The release states 11.5B unique parameters for the prediction module; ours is within 1.5 %."""
    assert mtp_params(load_model("deepseek-v3").spec) == pytest.approx(11.5e9, rel=0.015)


def test_kinds_of_hybrids_and_leading_dense_layers() -> None:
    """Kinds come in order of first appearance and index every layer."""
    deepseek = load_model("deepseek-v3").spec
    assert distinct_kinds(deepseek) == (("mla", "dense"), ("mla", "moe"))
    assert kind_indices(deepseek) == (0,) * 3 + (1,) * 58
    assert distinct_kinds(load_model("nemotron-h-8b").spec)[0] == ("mamba", "none")


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "qwen3-next-80b-a3b", "nemotron-3-super-120b-a12b", "opt-350m", "grok-1"]
)
def test_parts_add_up(name: str) -> None:
    """Layer matrices, vectors, embedding, head and the rest give the total; active never exceeds it."""
    model = load_model(name).spec
    layers = [layer_params(model, kind) for kind in model.layer_kinds()]
    parts = embedding_params(model) + head_params(model) + other_params(model)
    assert sum(layer.total for layer in layers) + parts == total_params(model)
    conventions = active_conventions(model)
    assert conventions.no_embeddings < conventions.no_input_embedding <= conventions.everything <= total_params(model)
    assert matmul_params_per_token(model) <= conventions.no_input_embedding
    for kind in distinct_kinds(model):
        matrices = sum(m.size for m in layer_matrices(model, kind) if m.part != "expert")
        assert matrices <= layer_params(model, kind).outside_experts


def test_windows_do_not_change_parameters() -> None:
    """A local layer has exactly the parameters of a global one, in every model of the catalogue that has both."""
    for identifier in model_ids():
        model = load_model(identifier).spec
        for mlp in {mlp for mixer, mlp in model.layer_kinds() if mixer == "window"}:
            assert layer_params(model, ("window", mlp)) == layer_params(model, ("attention", mlp))


@pytest.mark.parametrize(("multiple", "rows"), [(1, 50257), (128, 50304), (1024, 51200)])
def test_padded_vocabulary(multiple: int, rows: int) -> None:
    """GPT-2's vocabulary rounds up to the sizes that Megatron prints for tp 1 and 8."""
    assert padded_vocab(50257, np.array([multiple])).tolist() == [rows]
