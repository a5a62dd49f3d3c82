"""Model FLOPs: which convention is counted, and how it converts to the others in use."""

from __future__ import annotations

import pytest

from planner.catalog import load_model
from planner.cost.flops import (
    attention_flops_per_token,
    keys_per_query,
    model_flops_per_token,
    mtp_matmul_params,
)
from planner.cost.params import LayerKind, matmul_params_per_token
from planner.specs.model import WindowSpec

GIGA = 1e9


def full_square(model_name: str, seq_len: int) -> float:
    """Training FLOPs per token where attention is counted over the whole square, as torchtitan and PaLM do."""
    model = load_model(model_name).spec
    attention = 3.0 * sum(attention_flops_per_token(model, kind, seq_len) for kind in model.layer_kinds())
    return model_flops_per_token(model, seq_len) + attention


def test_llama_3_8b_in_both_conventions() -> None:
    """Llama-3-8B at 8192: 57.9 GFLOP a token with full attention (torchtitan), 51.5 counted causally."""
    model = load_model("llama-3-8b").spec
    assert full_square("llama-3-8b", 8192) / GIGA == pytest.approx(57.9, rel=0.002)
    assert model_flops_per_token(model, 8192) / GIGA == pytest.approx(51.5, rel=0.002)
    assert 6 * matmul_params_per_token(model) / GIGA == pytest.approx(45.03, rel=0.001)


@pytest.mark.parametrize(("seq_len", "ratio"), [(8192, 1.12), (32768, 1.36), (131072, 1.70)])
def test_full_over_causal_convention(seq_len: int, ratio: float) -> None:
    """Llama-3-8B: the full convention reports 12 % more at 8k, 70 % more at 128k."""
    causal = model_flops_per_token(load_model("llama-3-8b").spec, seq_len)
    assert full_square("llama-3-8b", seq_len) / causal == pytest.approx(ratio, abs=0.015)


@pytest.mark.parametrize(("seq_len", "share"), [(8192, 0.14), (131072, 2.3)])
def test_attention_over_matrices(seq_len: int, share: float) -> None:
    """Causal attention against the matrices of Llama-3-8B: 0.14 at 8k, 2.3 at 128k."""
    model = load_model("llama-3-8b").spec
    matrices = 6.0 * matmul_params_per_token(model)
    assert (model_flops_per_token(model, seq_len) - matrices) / matrices == pytest.approx(share, rel=0.04)


def test_published_speed_converts_to_the_published_rate() -> None:
    """6667 tokens/s per H100 of Llama-3-8B are 386 TFLOP/s or 39 % of 989 in torchtitan's convention."""
    rate = 6667 * full_square("llama-3-8b", 8192)
    assert rate / 1e12 == pytest.approx(386, rel=0.003)
    assert rate / 989e12 == pytest.approx(0.39, abs=0.005)


def test_window_limits_the_keys() -> None:
    """A query in a window sees at most the window; a window as long as the sequence changes nothing."""
    model = load_model("llama-3-8b").spec.model_copy(update={"window": WindowSpec(size=1024, global_every=0)})
    window: LayerKind = ("window", "dense")
    full: LayerKind = ("attention", "dense")
    assert keys_per_query(model, window, 8192) == 1024 - 1024**2 / (2 * 8192)
    assert keys_per_query(model, window, 1024) == keys_per_query(model, full, 1024) == 512
    assert keys_per_query(model, ("mamba", "none"), 8192) == 0.0


def test_only_visited_experts_count() -> None:
    """Mixtral at 4096: two of eight experts, so 6 x 12.9B less the embedding plus attention."""
    model = load_model("mixtral-8x7b").spec
    active = 12.88e9 - model.vocab * model.hidden
    attention = 3.0 * model.layers * attention_flops_per_token(model, model.layer_kinds()[0], 4096)
    assert model_flops_per_token(model, 4096) == pytest.approx(6 * active + attention, rel=0.002)


def test_multi_token_prediction_is_counted() -> None:
    """A prediction block adds a layer, its projection and one more pass through the head."""
    with_block = load_model("deepseek-v3").spec
    without = with_block.model_copy(update={"mtp_layers": 0})
    added = model_flops_per_token(with_block, 4096) - model_flops_per_token(without, 4096)
    kind = with_block.layer_kinds()[-1]
    assert mtp_matmul_params(without) == 0
    assert added == pytest.approx(
        6.0 * mtp_matmul_params(with_block) + 3.0 * attention_flops_per_token(with_block, kind, 4096), rel=1e-9
    )


def test_megatron_paper_formula() -> None:
    """GPT-175B: 72 B s L h^2 (1 + s/6h + V/12Lh), arXiv 2104.04473 without recomputation, is the full-square count."""
    model = load_model("gpt3-175b").spec
    s, layers, h, vocab = 2048, model.layers, model.hidden, model.vocab
    paper = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert full_square("gpt3-175b", s) == pytest.approx(paper, rel=0.001)
