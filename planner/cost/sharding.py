"""Gradient and parameter traffic of data parallelism, once a step or in every micro-batch, by sharding stage.

Stage 0 all-reduces gradients once a step, stage 1 scatters gradients and gathers parameters once a step, stage 2
scatters them in every micro-batch, stage 3 also gathers every layer's parameters forward and backward in every
micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.collectives import Group
from planner.cost.context import Work
from planner.cost.groups import Groups
from planner.specs.batch import BoolArray, FloatArray, IntArray

_BUCKET_PARAMS = 40e6
"""Gradients are reduced in buckets of about this many parameters (Megatron-LM: max(40M, 1M x dp); PyTorch and
DeepSpeed similar)."""
_PARAMETER_BYTES = 2.0


@dataclass(frozen=True)
class Weights:
    """Parameters of one layer (or of one end of the pipeline) on one rank, before data-parallel sharding; arrays of
    length N."""

    dense: FloatArray
    expert: FloatArray


@dataclass(frozen=True)
class LayerTraffic:
    """Seconds of one layer's data-parallel traffic."""

    once: FloatArray
    """Once a step, to be hidden behind the last backward and first forward pass."""
    forward: FloatArray
    """In every micro-batch, beside the forward pass of a neighbouring layer."""
    backward: FloatArray


def traffic(work: Work, groups: Groups, weights: Weights) -> LayerTraffic:
    """Traffic of ``weights``, dense and expert parts in their own groups."""
    stage = work.batch.zero_stage
    hybrid = work.batch.shard_degree < work.batch.dp * work.batch.cp
    dense_once, dense_forward, dense_backward = _traffic(
        work, groups.shard, groups.regather, groups.data, groups.replica, hybrid, stage, weights.dense
    )
    # Expert weights are reduced over their own replicas; without expert parallelism those are the dense ones.
    expert_once, expert_forward, expert_backward = _traffic(
        work,
        groups.expert_data,
        groups.expert_data,
        groups.expert_data,
        groups.replica,
        np.zeros_like(hybrid),
        stage,
        weights.expert,
    )
    return LayerTraffic(dense_once + expert_once, dense_forward + expert_forward, dense_backward + expert_backward)


def _traffic(
    work: Work,
    shard: Group,
    regather: Group,
    data: Group,
    replica: Group,
    hybrid: BoolArray,
    stage: IntArray,
    params: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    habits = work.context.backend.habits
    gradient = habits.gradient_reduce_bytes(work.context.job)
    parameter = 4.0 if work.context.job.precision == "fp32" else _PARAMETER_BYTES
    per_layer = habits.data_parallel_overlap == "every-layer"
    message = params if per_layer else np.full(len(params), _BUCKET_PARAMS)
    scatter = _per_message(shard.all_gather_s(gradient * message), params, message)
    gather = _per_message(shard.all_gather_s(parameter * message), params, message)
    again = _per_message(regather.all_gather_s(parameter * message), params, message)
    reduce = _per_message(data.all_reduce_s(gradient * message), params, message)
    across = np.where(
        hybrid, _per_message(replica.all_reduce_s(gradient * message / work.batch.shard_degree), params, message), 0.0
    )
    once = np.select([stage == 0, stage == 1, stage == 2], [reduce, scatter + gather + across, gather], 0.0)
    forward = np.where(stage == 3, gather, 0.0)
    backward = np.select([stage == 2, stage == 3], [scatter + across, again + scatter + across], 0.0)
    return once, forward, backward


def _per_message(seconds: FloatArray, params: FloatArray, message: FloatArray) -> FloatArray:
    """Seconds for ``params`` when messages of ``message`` parameters take ``seconds`` each."""
    return np.where(params > 0, seconds * params / np.maximum(message, 1.0), 0.0)
