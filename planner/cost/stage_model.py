"""The part of the cost of a strategy that is linear in what the constraint solver decides.

Physics (GEMMs, collectives, tensors) fills a ``StageModel``: per-layer times and bytes and what each end of the
pipeline adds. ``assemble`` turns it, with layers per stage, recomputed layers and offloaded share, into step time and
memory.  The search, its bound, the CP-SAT model and every estimate read these same coefficients, so they cannot
disagree.

Axes: N candidates, K layer kinds, P pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.specs.batch import FloatArray, IntArray


@dataclass(frozen=True)
class StageModel:
    """Coefficients of N candidates that share one pipeline depth.

    Step time = slowest_weight * T_max + others_weight * (sum_r T_r - T_max) + p2p + max_r tail_r + constant, with the
    rank's time per micro-batch T_r = sum_k layers_rk * layer_time + recomputed_rk * recompute_time + first/last
    extras.  Ranks with several chunks take them in turn, all the same one at about the same time, so that T_max is the
    sum over the chunks c of the slowest rank's time for each, sum_c max_r T_rc."""

    pp: int
    slowest_weight: FloatArray
    """(N,) weight of T_max: the micro-batches m of a step and replica."""
    others_weight: FloatArray
    """(N,) weight of the other ranks' time in fill and drain: 1 for 1F1B and GPipe, 1/v interleaved, smaller for zero
    bubble.  Where ranks share cores both weights can be m / p: all work on all cores, whatever a stage takes."""
    layer_time_s: FloatArray
    """(N, K) forward and backward of one layer and micro-batch."""
    recompute_time_s: FloatArray
    """(N, K) added by recomputing one layer."""
    first_time_s: FloatArray
    """(N,) added to rank 0 per micro-batch (embedding)."""
    last_time_s: FloatArray
    """(N,) added to the last rank per micro-batch (head, loss, MTP)."""
    p2p_time_s: FloatArray
    """(N,) exposed stage-to-stage traffic of a step."""
    constant_time_s: FloatArray
    """(N,) once a step: gradient norm, logging, tied-embedding all-reduce."""
    # Tail: what follows the last backward pass on a rank.  exposed = max(floor, comm - window_share * T_r).
    layer_reduce_time_s: FloatArray
    """(N, K) gradient and parameter traffic of one layer's weights, once a step."""
    first_reduce_time_s: FloatArray
    last_reduce_time_s: FloatArray
    reduce_window_share: FloatArray
    """(N,) micro-batch times T_r of the rank behind which that traffic can hide; above 1 where chunks end in turn."""
    reduce_floor_s: FloatArray
    """(N,) part of the traffic that nothing can hide (first and last bucket)."""
    layer_optimizer_time_s: FloatArray
    """(N, K) optimizer step on the GPU."""
    first_optimizer_time_s: FloatArray
    last_optimizer_time_s: FloatArray
    layer_offload_time_s: FloatArray
    """(N, K) added by offloading the whole optimizer (CPU step and transfers, less the GPU step)."""
    first_offload_time_s: FloatArray
    last_offload_time_s: FloatArray
    # Memory of a rank (allocated bytes, before memory_factor and the device overhead).
    layer_state_bytes: FloatArray
    """(N, K) weights, gradients, optimizer of one layer, nothing offloaded."""
    layer_offloadable_bytes: FloatArray
    """(N, K) of these, removed by a full optimizer offload."""
    first_state_bytes: FloatArray
    last_state_bytes: FloatArray
    first_offloadable_bytes: FloatArray
    last_offloadable_bytes: FloatArray
    layer_activation_bytes: FloatArray
    """(N, K) saved by one layer for one micro-batch."""
    recompute_saved_bytes: FloatArray
    """(N, K) of these, not saved when the layer is recomputed."""
    first_activation_bytes: FloatArray
    """(N,) per micro-batch in flight on rank 0: token ids, the mask of the embedding's dropout, a kept stage output."""
    in_flight: FloatArray
    """(N, P) micro-batches' worth of the rank's whole stage alive at the peak."""
    fixed_bytes: FloatArray
    """(N,) on every rank: working buffers and transients."""
    last_fixed_bytes: FloatArray
    """(N,) more on the last rank: logits and loss beyond the common transient."""
    step_temporary_layer_bytes: FloatArray
    """(N, K) alive only in the optimizer step, when no activations are."""
    layer_host_bytes: FloatArray
    """(N, K) host memory of one rank for one layer when the optimizer is fully offloaded."""
    first_host_bytes: FloatArray
    last_host_bytes: FloatArray
    fixed_host_bytes: FloatArray
    """(N,) host memory of one rank whatever is offloaded of the optimizer: process, activations that wait there."""
    local_ranks: FloatArray
    """(N,) ranks of one node."""
    memory_factor: FloatArray
    """(N,) reserved over allocated."""
    device_overhead_bytes: FloatArray
    """(N,) context, communication buffers, libraries."""

    def __len__(self) -> int:
        return len(self.slowest_weight)


@dataclass(frozen=True)
class StageResult:
    """What ``assemble`` finds; arrays of length N or (N, P)."""

    rank_time_s: FloatArray
    """(N, P) forward and backward of one micro-batch, all chunks of a rank together."""
    pipeline_time_s: FloatArray
    """(N,) m * T_max + bubble + p2p."""
    rank_tail_s: FloatArray
    """(N, P) exposed gradient traffic and optimizer."""
    step_time_s: FloatArray
    rank_memory_bytes: FloatArray
    """(N, P) peak on the device."""
    peak_memory_bytes: FloatArray
    """(N,) worst rank."""
    host_memory_bytes_per_node: FloatArray
    """(N,) a node full of the worst rank."""


def _ends(first: FloatArray, last: FloatArray, ranks: int) -> FloatArray:
    """(N, P) with ``first`` on rank 0 and ``last`` on the last rank (both on the same rank when P is 1)."""
    out = np.zeros((len(first), ranks))
    out[:, 0] += first
    out[:, -1] += last
    return out


def _by_kind(counts: IntArray, per_layer: FloatArray) -> FloatArray:
    """(N, ..., K) counts times (N, K) amounts, summed over the kinds."""
    # K is 1 to 3, so an explicit sum beats einsum.
    shape = (-1, *[1] * (counts.ndim - 2))
    total = counts[..., 0] * per_layer[:, 0].reshape(shape)
    for k in range(1, per_layer.shape[1]):
        total = total + counts[..., k] * per_layer[:, k].reshape(shape)
    return total


def _slowest(model: StageModel, layers: IntArray, recomputed: IntArray) -> FloatArray:
    """(N,) T_max: the slowest rank's time for each chunk, all chunks together."""
    chunks = _by_kind(layers, model.layer_time_s) + _by_kind(recomputed, model.recompute_time_s)
    chunks[:, 0, 0] += model.first_time_s
    chunks[:, -1, -1] += model.last_time_s
    return np.asarray(chunks.max(axis=2).sum(axis=1))


def assemble(model: StageModel, layers: IntArray, recomputed: IntArray, offload: FloatArray) -> StageResult:
    """Step time and memory of each candidate.

    ``layers`` and ``recomputed`` are (N, V, P, K): layers of each kind in each chunk of each pipeline rank, and how
    many of them recompute; ``offload`` (N,) is the offloaded share of the optimizer states."""
    p = model.pp
    slowest = _slowest(model, layers, recomputed)
    layers, recomputed = layers.sum(axis=1), recomputed.sum(axis=1)

    rank_time = (
        _by_kind(layers, model.layer_time_s)
        + _by_kind(recomputed, model.recompute_time_s)
        + _ends(model.first_time_s, model.last_time_s, p)
    )
    pipeline = (
        model.slowest_weight * slowest + model.others_weight * (rank_time.sum(axis=1) - slowest) + model.p2p_time_s
    )
    traffic = _by_kind(layers, model.layer_reduce_time_s) + _ends(
        model.first_reduce_time_s, model.last_reduce_time_s, p
    )
    exposed = np.maximum(model.reduce_floor_s[:, None], traffic - model.reduce_window_share[:, None] * rank_time)
    optimizer = _by_kind(layers, model.layer_optimizer_time_s) + _ends(
        model.first_optimizer_time_s, model.last_optimizer_time_s, p
    )
    offloaded = _by_kind(layers, model.layer_offload_time_s) + _ends(
        model.first_offload_time_s, model.last_offload_time_s, p
    )
    tail = exposed + optimizer + offload[:, None] * offloaded
    step = pipeline + tail.max(axis=1) + model.constant_time_s

    state = (
        _by_kind(layers, model.layer_state_bytes)
        + _ends(model.first_state_bytes, model.last_state_bytes, p)
        - offload[:, None]
        * (
            _by_kind(layers, model.layer_offloadable_bytes)
            + _ends(model.first_offloadable_bytes, model.last_offloadable_bytes, p)
        )
    )
    saved = _by_kind(layers, model.layer_activation_bytes) - _by_kind(recomputed, model.recompute_saved_bytes)
    zero = np.zeros(len(model))
    forward_backward = (
        state
        + model.in_flight * (saved + _ends(model.first_activation_bytes, zero, p))
        + model.fixed_bytes[:, None]
        + _ends(zero, model.last_fixed_bytes, p)
    )
    optimizer_step = state + _by_kind(layers, model.step_temporary_layer_bytes)
    memory = (
        np.maximum(forward_backward, optimizer_step) * model.memory_factor[:, None]
        + model.device_overhead_bytes[:, None]
    )
    host = _by_kind(layers, model.layer_host_bytes) + _ends(model.first_host_bytes, model.last_host_bytes, p)
    node = model.local_ranks * (offload * host.max(axis=1) + model.fixed_host_bytes)
    return StageResult(rank_time, pipeline, tail, step, memory, memory.max(axis=1), node)
