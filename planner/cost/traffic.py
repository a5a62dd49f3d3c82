"""Bytes that elementwise kernels move through device memory, forward, per layer and micro-batch; the backward pass
moves twice as many.

Counts are for kernels fused within themselves (one pass a norm, a rotary, an activation, an add); eager stacks
multiply them by ``eager_traffic_factor``."""

from __future__ import annotations

import numpy as np

from planner.cost.context import Work
from planner.cost.params import LayerKind, layer_matrices
from planner.specs.batch import FloatArray

_NORM = 4.0
"""Bytes per hidden element of one norm: read 2, write 2."""
_RESIDUAL = 6.0
"""Bytes per hidden element of one residual add: two inputs read, the sum written."""
_PERMUTE = 8.0
"""Bytes per hidden element and visited expert: gather into expert order and back, read 2 and write 2 each."""
_OUTPUT_BIAS = 12.0
"""Bytes per output element of a biased expert: bias times probability written 2, added 6, experts concatenated 4
(Megatron-Core, moe/experts.py)."""
_INPUT_BIAS = 4.0
"""Bytes per inner element of a biased expert: a second pass that adds the bias."""
_MIXER_PASSES = 18.0
"""Bytes per channel of a scan mixer: convolution and its activation read 2 and write 2, the scan reads and writes 2,
its skip reads 2, split into contiguous parts 2 and 2, gated norm reads 4 and writes 2."""
_CHUNK_STATE = 16.0
"""Bytes per state element and chunk: fp32 written once, read and written by the pass over chunks, read again."""
_CHUNK = 128.0
"""Tokens of one chunk (Megatron's mamba_chunk_size; 64 in delta-rule kernels)."""
_CAST = {"delayed": 3.0, "tensor": 9.0, "block": 8.4}
_FP4_CAST = 12.6
"""Bytes per GEMM input element, forward, of quantising inputs and (with the backward pass counted twice) gradients.

Transformer Engine's profile of one layer on B300 (15,872 tokens, h 4096, f 16384) spends on it 0.64 ms with delayed,
2.0 with current, 1.8 with mxfp8 and 2.7 with nvfp4 scaling, over 1.04e9 elements; here 1.37e9 are counted."""
_FROZEN_CAST = 0.75
"""Share of it with frozen weights, whose inputs need no column-wise copy."""


def norms_s(work: Work) -> FloatArray:
    """Seconds of norms and residual adds, forward."""
    context = work.context
    model, habits, scale = context.model, context.backend.habits, context.activation_bytes / 2.0
    elements = scale * model.hidden * model.norms_per_layer * work.sp_tokens
    if habits.norm_bytes is None:
        return stream_s(work, (_NORM + _RESIDUAL) * elements)
    return habits.norm_bytes * elements / context.stream_bytes_per_s + stream_s(work, _RESIDUAL * elements)


def gradient_add_s(work: Work, params: FloatArray) -> FloatArray:
    """Seconds to add the gradients of ``params`` local parameters to those of earlier micro-batches."""
    return work.context.backend.habits.gradient_add_bytes * params / work.context.stream_bytes_per_s


def rotary_bytes(work: Work, kind: LayerKind) -> FloatArray:
    """Rotary position and query/key norms: read and write queries and keys."""
    model = work.context.model
    if kind[0] not in ("attention", "window", "mla"):
        return work.zeros()
    passes = (1.0 if model.position == "rope" else 0.0) + (1.0 if model.qk_norm != "none" else 0.0)
    width = (model.heads + (model.heads if model.mla else model.kv_heads)) * model.head_dim
    return passes * 2.0 * work.context.activation_bytes * width * work.tokens / work.tp


def mixer_bytes(work: Work, kind: LayerKind) -> FloatArray:
    """State-space and delta-rule mixers: convolution, gated norm, scan inputs and output, and the states of every
    chunk, which travel through memory in fp32."""
    model = work.context.model
    if kind[0] == "mamba" and model.mamba is not None:
        channels = model.mamba.heads * model.mamba.head_dim
        beside, state = 2 * model.mamba.groups * model.mamba.state, model.mamba.state
    elif kind[0] == "gdn" and model.gdn is not None:
        channels = model.gdn.v_heads * model.gdn.v_dim
        beside, state = 2 * model.gdn.qk_heads * model.gdn.qk_dim, model.gdn.qk_dim
    else:
        return work.zeros()
    streamed = _MIXER_PASSES * (channels + beside) + _CHUNK_STATE / _CHUNK * channels * state
    return streamed * work.tokens / work.tp


def activation_bytes(work: Work, kind: LayerKind) -> FloatArray:
    """Activation function (and gate): read its inputs, write its output."""
    model, size = work.context.model, work.context.activation_bytes
    reads_and_writes = size * (3.0 if model.gated_mlp else 2.0)
    if kind[1] == "dense":
        return reads_and_writes * model.ffn * work.tokens / work.tp
    if kind[1] == "moe" and model.moe is not None:
        fused = work.context.backend.habits.fused_expert_mlp and work.context.job.narrow
        routed = work.zeros() if fused else work.routed_rows * model.moe.expert_ffn / work.etp
        return reads_and_writes * (routed + model.moe.shared_ffn * work.tokens / work.tp)
    return work.zeros()


def routing_bytes(work: Work, kind: LayerKind) -> FloatArray:
    """Permutation into expert order and back, router probabilities in fp32."""
    moe = work.context.model.moe
    if kind[1] != "moe" or moe is None:
        return work.zeros()
    model = work.context.model
    width = moe.latent or model.hidden
    per_row = np.full(len(work.batch), _PERMUTE * width)
    if model.bias.mlp:
        inner = (2.0 if model.gated_mlp else 1.0) * moe.expert_ffn / work.etp
        per_row = per_row + _OUTPUT_BIAS * width + _INPUT_BIAS * inner
    return per_row * work.routed_rows + 8.0 * moe.experts * work.sp_tokens


def cast_bytes(work: Work, kind: LayerKind) -> FloatArray:
    """Quantisation of GEMM inputs in an fp8 or fp4 job."""
    model = work.context.model
    if not work.context.job.narrow:
        return work.zeros()
    # Transformer Engine quantises its part of a split input before the gather.
    block_input = model.hidden * work.sp_tokens
    elements = work.zeros()
    if kind[0] != "none":
        # The output projections are the only matrices of a mixer that are split by rows.
        matrices = [m for m in layer_matrices(model, kind) if m.part in ("attention", "mixer")]
        output = sum(m.inputs for m in matrices if m.split == "row")
        latent = sum(m.inputs for m in matrices if m.name in ("q_up", "kv_up"))
        elements = block_input + (latent + output / work.tp) * work.tokens
    if kind[1] == "dense":
        elements = elements + block_input + model.ffn / work.tp * work.tokens
    elif kind[1] == "moe" and model.moe is not None:
        inner = 0.0 if work.context.backend.habits.fused_expert_mlp else model.moe.expert_ffn / work.etp
        elements = elements + ((model.moe.latent or model.hidden) + inner) * work.routed_rows
    recipe = work.context.backend.scaling_recipe(work.context.cluster)
    each = _FP4_CAST if work.context.job.precision == "nvfp4" else _CAST[recipe]
    return each * (_FROZEN_CAST if work.context.job.frozen else 1.0) * elements


def stream_s(work: Work, fused_bytes: FloatArray, *, fused: bool = False) -> FloatArray:
    """Seconds of elementwise kernels whose fused traffic is ``fused_bytes``; ``fused`` ones are single kernels in every
    framework."""
    context = work.context
    factor = 1.0 if fused or context.backend.habits.fused_kernels else context.constants.eager_traffic_factor
    return np.asarray(fused_bytes * factor / context.stream_bytes_per_s)
