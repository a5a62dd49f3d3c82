"""Time of core attention: fused kernels by sequence length and occupancy, or materialised scores; state-space mixers
too.

FLOPs are counted over the causal half; the backward pass of a fused kernel recomputes the scores and executes 2.5 x
forward."""

from __future__ import annotations

import numpy as np

from planner.cost.context import Work
from planner.cost.flops import attention_flops_per_token, keys_per_query
from planner.cost.params import LayerKind
from planner.specs.batch import FloatArray

_BACKWARD_OVER_FORWARD = 2.5
_BLOCK_ROWS = 128.0
_SCORE_BYTES_FORWARD = 11.0
"""Unfused softmax with dropout: scores written (2), read and written by softmax (4), dropout read, written and its
mask (5)."""
_SMALL_GEMM_SHARE = 0.6
"""Batched score multiplications reach less of the rate than one large GEMM (inner width is one head)."""
_SCAN_FLOPS_PER_STATE = 6.0
"""A chunked state-space scan spends about six FLOPs per token, channel and state element (arXiv 2405.21060, section
6)."""


def attention_s(work: Work, kind: LayerKind) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of the token mixer proper, projections excluded, for one layer and micro-batch."""
    if kind[0] in ("mamba", "gdn"):
        return _scan_s(work, kind)
    context = work.context
    per_token = attention_flops_per_token(context.model, kind, context.job.seq_len)
    if per_token == 0.0:
        return work.zeros(), work.zeros()
    flops = per_token * work.tokens / work.tp
    if not context.job.flash_attention:
        return _materialised_s(work, kind, flops)
    constants = context.constants
    length = keys_per_query(context.model, kind, context.job.seq_len) * 2.0
    blocks = work.tokens * np.maximum(context.model.heads / work.tp, 1.0) / _BLOCK_ROWS
    half_blocks = constants.attention_half_blocks_per_sm * (context.cluster.accelerator.sms or 100)
    reach = length / (length + constants.attention_half_length) * blocks / (blocks + half_blocks)
    rate = context.dense_flops_per_s * reach
    if context.backend.habits.attention_kernel == "flash2":
        rate = rate * constants.flash2_attention_factor
    forward = flops / (rate * constants.attention_forward_share)
    backward = _BACKWARD_OVER_FORWARD * flops / (rate * constants.attention_backward_share)
    return forward, backward


def _materialised_s(work: Work, kind: LayerKind, causal_flops: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Scores written to memory: the full square is multiplied and softmax and dropout stream it."""
    context = work.context
    rate = context.dense_flops_per_s * context.constants.gemm_share * _SMALL_GEMM_SHARE
    scores = work.tokens * context.job.seq_len * np.maximum(context.model.heads / work.tp, 1.0)
    stream = _SCORE_BYTES_FORWARD * scores / context.stream_bytes_per_s
    forward = 2.0 * causal_flops / rate + stream
    return forward, 2.0 * forward


def _scan_s(work: Work, kind: LayerKind) -> tuple[FloatArray, FloatArray]:
    model, constants = work.context.model, work.context.constants
    if kind[0] == "mamba" and model.mamba is not None:
        channels, state = model.mamba.heads * model.mamba.head_dim, model.mamba.state
    elif model.gdn is not None:
        channels, state = model.gdn.v_heads * model.gdn.v_dim, model.gdn.qk_dim
    else:
        raise ValueError(f"layer kind {kind} without its dimensions")
    flops = _SCAN_FLOPS_PER_STATE * channels * state * work.tokens / work.tp
    forward = flops / (work.context.dense_flops_per_s * constants.scan_share)
    return forward, _BACKWARD_OVER_FORWARD * forward
