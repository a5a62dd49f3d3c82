"""Model FLOPs: the convention behind every MFU that the planner prints.

Counted: 2 FLOPs per weight and token forward, backward twice that; core attention over the keys a causal mask admits
(half of s on average, the window where it is smaller).  Not counted: recomputation, the embedding lookup, norms.
Megatron-LM counts the same way since March 2025; sources that count the full square report more for the same speed
(Llama-3-8B at s 8192: 1.12 x)."""

from __future__ import annotations

from planner.cost.params import LayerKind, head_widths, layer_matmul_params, matmul_params_per_token
from planner.specs.model import ModelSpec


def keys_per_query(model: ModelSpec, kind: LayerKind, seq_len: int) -> float:
    """Average keys that one query attends to: s/2 causal, w - w^2/(2s) in a window w < s, 0 without attention."""
    mixer = kind[0]
    if mixer in ("none", "mamba", "gdn"):
        return 0.0
    if mixer == "window" and model.window is not None and model.window.size < seq_len:
        return model.window.size - model.window.size**2 / (2.0 * seq_len)
    return seq_len / 2.0


def attention_flops_per_token(model: ModelSpec, kind: LayerKind, seq_len: int) -> float:
    """Forward core attention (scores and weighted values) of one layer: 2 keys n (d_qk + d_v)."""
    qk, value = head_widths(model)
    return 2.0 * keys_per_query(model, kind, seq_len) * model.heads * (qk + value)


def mtp_matmul_params(model: ModelSpec) -> int:
    """Weights that the multi-token-prediction blocks multiply a token with: block, projection and the shared head."""
    if not model.mtp_layers:
        return 0
    block = sum(layer_matmul_params(model, kind) for kind in model.prediction_kinds())
    return model.mtp_layers * (block + 2 * model.hidden**2 + model.vocab * model.hidden)


def model_flops_per_token(model: ModelSpec, seq_len: int, *, frozen: bool = False) -> float:
    """Training FLOPs (forward and backward) per token in the convention above; ``frozen`` weights have no gradients of
    their own, and what adapters add is not counted."""
    kinds = model.layer_kinds()
    attention = sum(attention_flops_per_token(model, kind, seq_len) for kind in kinds)
    if model.mtp_layers:
        block = sum(attention_flops_per_token(model, kind, seq_len) for kind in model.prediction_kinds())
        attention += model.mtp_layers * block
    matrices = 2.0 * (matmul_params_per_token(model) + mtp_matmul_params(model))
    return (2.0 if frozen else 3.0) * matrices + 3.0 * attention
