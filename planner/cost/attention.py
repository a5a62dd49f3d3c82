"""Time of core attention: fused kernels by sequence length and occupancy, or materialised scores; state-space mixers
too.

FLOPs of fused kernels are counted over the causal half; their backward pass recomputes the scores and executes 2.5 x
forward."""

from __future__ import annotations

import numpy as np

from planner.cost.context import Work
from planner.cost.flops import attention_flops_per_token, keys_per_query
from planner.cost.params import LayerKind, head_widths
from planner.specs.batch import FloatArray

_BACKWARD_OVER_FORWARD = 2.5
_BLOCK_ROWS = 128.0
_TILE_WIDTH = 32.0
_STATED_WIDTH = 128.0
"""Head width that the rates of the constants are for."""
_SCORE_BYTES = {"fused": (16.0, 20.0), "operators": (28.0, 56.0)}
"""Memory traffic per score, forward and backward.  Fused scale, mask and softmax: scores written (2), read and written
by softmax (4), dropout that reads, writes and keeps its mask (5) at half the bandwidth, for it draws random numbers;
backward gradients of dropout (5) and softmax (6), and the scores that four multiplications write and read (9).  An
operator each: scores written (2), scaled and masked (4 + 4), cast to fp32 (6), softmax (8) and cast back (6), less what
stays in cache; backward twice as much."""
_SMALL_GEMM_SHARE = 0.6
"""Batched score multiplications reach less of the rate than one large GEMM (inner width is one head)."""
_FLASH1_OVER_FLASH2 = 0.5
"""FlashAttention-2 is about twice as fast as the first version (arXiv 2307.08691)."""
_UNALIGNED_SHARE = 0.55
"""Share of the fp32 rate of the plain cores at which heads that tensor cores cannot load are multiplied (BLOOM
candidates with heads of 108 and 225: 9 to 12 of 19.5 TFLOP/s)."""
_SCAN_FLOPS_PER_STATE = 6.0
"""A chunked state-space scan spends about six FLOPs per token, channel and state element (arXiv 2405.21060, section
6)."""


def attention_s(work: Work, kind: LayerKind) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of the token mixer proper, projections excluded, for one layer and micro-batch."""
    if kind[0] in ("mamba", "gdn"):
        return _scan_s(work, kind)
    context = work.context
    per_token = attention_flops_per_token(context.model, kind, context.job.attended_tokens)
    if per_token == 0.0:
        return work.zeros(), work.zeros()
    if not context.job.flash_attention:
        return _materialised_s(work)
    flops = per_token * work.tokens / work.tp * _slowest_context_rank(work)
    constants = context.constants
    length = keys_per_query(context.model, kind, context.job.attended_tokens) * 2.0
    blocks = work.tokens * np.maximum(context.model.heads / work.tp, 1.0) / _BLOCK_ROWS
    half_blocks = constants.attention_half_blocks_per_sm * (context.cluster.accelerator.sms or 100)
    reach = length / (length + constants.attention_half_length) * blocks / (blocks + half_blocks)
    rate = context.dense_flops_per_s * reach * _width_factor(work)
    kernel = context.backend.habits.attention_kernel
    if kernel != "vendor":
        rate = rate * constants.flash2_attention_factor * (_FLASH1_OVER_FLASH2 if kernel == "flash1" else 1.0)
    forward = flops / (rate * constants.attention_forward_share)
    backward = _BACKWARD_OVER_FORWARD * flops / (rate * constants.attention_backward_share)
    return forward, backward


def _slowest_context_rank(work: Work) -> FloatArray:
    """(N,) causal work of the busiest context-parallel rank over the average: with one run of the sequence a rank, the
    last of c ranks attends to (2c - 1) / 2c of all keys where the average is one half."""
    context = work.context
    whole = context.job.attended_tokens == context.job.seq_len
    if context.backend.habits.context_parallel_balanced or not whole:
        return np.ones(len(work.batch))
    return np.asarray(2.0 - 1.0 / work.cp)


def _width_factor(work: Work) -> float:
    """Rate at this head width over that at 128; narrow tiles are padded to a multiple of 32."""
    model, half = work.context.model, work.context.constants.attention_half_width
    width = sum(head_widths(model)) / 2.0
    padded = _TILE_WIDTH * np.ceil(width / _TILE_WIDTH)
    return float(width / (padded + half) * (_STATED_WIDTH + half) / _STATED_WIDTH)


def _materialised_s(work: Work) -> tuple[FloatArray, FloatArray]:
    """Scores written to memory: the full square is multiplied, whatever the mask, and softmax and dropout stream it."""
    context = work.context
    rate = context.dense_flops_per_s * context.constants.gemm_share * _SMALL_GEMM_SHARE
    if context.model.head_dim % 8 and context.cluster.accelerator.peak.fp32 is not None:
        rate = context.cluster.accelerator.peak.fp32 * _UNALIGNED_SHARE
    scores = work.tokens * context.job.seq_len * np.maximum(context.model.heads / work.tp, 1.0)
    flops = 2.0 * scores * sum(head_widths(context.model))
    forward, backward = _SCORE_BYTES[context.backend.habits.score_kernel]
    multiplied, streamed = flops / rate, scores / context.stream_bytes_per_s
    return multiplied + forward * streamed, 2.0 * multiplied + backward * streamed


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
