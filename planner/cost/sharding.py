"""Gradient and parameter traffic of data parallelism, once a step or in every micro-batch, by sharding stage.

Stage 0 all-reduces gradients once a step, stage 1 scatters gradients and gathers parameters once a step, stage 2
scatters them in every micro-batch (and gathers parameters once a step, or in every forward pass where the framework
frees them after the backward pass), stage 3 also gathers every layer's parameters forward and backward in every
micro-batch.  Parameters offloaded to the host cross its link on the way to every gather."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.collectives import SECONDS, SENT_BYTES, Group, Measure
from planner.cost.context import Work
from planner.cost.groups import Groups
from planner.cost.optimizer import host_link_bytes_per_s
from planner.specs.batch import DEVICES, BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Weights:
    """Parameters of one layer (or of one end of the pipeline) on one rank, before data-parallel sharding; arrays of
    length N."""

    dense: FloatArray
    expert: FloatArray
    adapters: Weights | None = None
    """What is trained in place of them, where they are frozen (lora jobs)."""
    tables: FloatArray | float = 0.0
    """Of the dense ones, embedding and head, which are multiplied in 16 bits whatever the job's format."""

    @property
    def trained(self) -> Weights:
        """The parameters that get gradients and optimizer steps."""
        return self if self.adapters is None else self.adapters


@dataclass(frozen=True)
class LayerTraffic:
    """Data-parallel traffic of one layer: seconds, or bytes that one rank sends."""

    once: FloatArray
    """Once a step, to be hidden behind the last backward and first forward pass."""
    forward: FloatArray
    """In every micro-batch, beside the forward pass of a neighbouring layer."""
    backward: FloatArray


@dataclass(frozen=True)
class _Part:
    """Dense or expert weights with the ranks that share them."""

    shard: Group
    """Ranks that share sharded states."""
    regather: Group
    """Ranks of the backward gather."""
    data: Group
    """All replicas."""
    replica: Group
    """Copies of a shard."""
    hybrid: BoolArray
    """There are several copies of a shard."""
    degree: IntArray
    """Ranks of a shard."""
    params: FloatArray
    trained: FloatArray


def traffic(work: Work, groups: Groups, weights: Weights) -> LayerTraffic:
    """Seconds of the traffic of ``weights``, dense and expert parts in their own groups.

    Parameters in host memory take at least their way over its link."""
    return _sum(
        [
            _combined(work, _exchanges(work, part, SECONDS), _host_gather_s(work, part.params / part.degree))
            for part in _parts(work, groups, weights)
        ]
    )


def sent_bytes(work: Work, groups: Groups, weights: Weights) -> LayerTraffic:
    """The same traffic as bytes that one rank sends."""
    parts = _parts(work, groups, weights)
    return _sum([_combined(work, _exchanges(work, part, SENT_BYTES), work.zeros()) for part in parts])


def _sum(parts: list[LayerTraffic]) -> LayerTraffic:
    total = parts[0]
    for part in parts[1:]:
        total = LayerTraffic(total.once + part.once, total.forward + part.forward, total.backward + part.backward)
    return total


def _parts(work: Work, groups: Groups, weights: Weights) -> list[_Part]:
    shard = np.maximum(work.batch.shard_degree, 1)
    dense = _Part(
        groups.shard,
        groups.regather,
        groups.data,
        groups.replica,
        shard < groups.data.size,
        shard,
        weights.dense,
        weights.trained.dense,
    )
    if work.context.model.moe is None or not np.any(weights.expert):
        return [dense]
    # Expert weights are reduced over their own replicas; without expert parallelism those are the dense ones.
    expert = _Part(
        groups.expert_shard,
        groups.expert_regather,
        groups.expert_data,
        groups.expert_replica,
        work.expert_shard_degree < work.expert_group,
        work.expert_shard_degree,
        weights.expert,
        weights.trained.expert,
    )
    return [dense, expert]


@dataclass(frozen=True)
class _Exchanges:
    """Every exchange that some sharding stage has, each once for all parameters."""

    scatter: FloatArray
    """Gradients to their shards."""
    gather: FloatArray
    """Parameters for compute."""
    again: FloatArray
    """The same in the backward pass."""
    renew: FloatArray
    """Parameters that the optimizer has changed."""
    reduce: FloatArray
    """Gradients over all replicas."""
    across: FloatArray
    """Gradients over the copies of a shard."""


def _exchanges(work: Work, part: _Part, measure: Measure) -> _Exchanges:
    """Sharded parameters are gathered for compute; only trained ones (the same, or adapters beside frozen ones) are
    reduced, and gathered again after the optimizer has changed them."""
    habits = work.context.backend.habits
    gradient = habits.gradient_reduce_bytes(work.context.job)
    parameter = work.context.job.compute_bytes
    params, trained = part.params, part.trained
    per_layer = habits.data_parallel_overlap == "every-layer"
    bucket = np.full(len(params), habits.bucket_params)
    message, changed = (params, trained) if per_layer else (bucket, bucket)
    copies = measure.all_reduce(part.replica, gradient * changed / part.degree)
    return _Exchanges(
        scatter=_per_message(measure.all_gather(part.shard, gradient * changed), trained, changed),
        gather=_per_message(measure.all_gather(part.shard, parameter * message), params, message),
        again=_per_message(measure.all_gather(part.regather, parameter * message), params, message),
        renew=_per_message(measure.all_gather(part.shard, parameter * changed), trained, changed),
        reduce=_per_message(measure.all_reduce(part.data, gradient * changed), trained, changed),
        across=np.where(part.hybrid, _per_message(copies, trained, changed), 0.0),
    )


def _combined(work: Work, moved: _Exchanges, least: FloatArray) -> LayerTraffic:
    """Which of the exchanges a strategy has, and when; gathers take at least ``least``."""
    stage = work.traffic_stage
    gather, again, renew = (np.maximum(gathered, least) for gathered in (moved.gather, moved.again, moved.renew))
    repeated = work.context.backend.habits.gathers_every_micro_batch & (stage == 2)
    # Nested np.where: np.select takes several times as long on the short arrays of a search.
    once = np.where(stage == 1, moved.scatter + renew + moved.across, np.where((stage == 2) & ~repeated, renew, 0.0))
    once = np.where(stage == 0, moved.reduce, once)
    forward = np.where((stage == 3) | repeated, gather, 0.0)
    backward = np.where(stage >= 2, moved.scatter + moved.across, 0.0) + np.where(stage == 3, again, 0.0)
    return LayerTraffic(once, forward, backward)


def _host_gather_s(work: Work, held: FloatArray) -> FloatArray:
    """Seconds to bring a rank's ``held`` parameters to the GPU, where they live in host memory or on NVMe."""
    place = work.batch.offload_parameters
    if not np.any(place):
        return work.zeros()
    cluster = work.context.cluster
    size = work.context.backend.habits.offloaded_parameter_bytes * held
    seconds = size / host_link_bytes_per_s(cluster)
    if cluster.nvme_bytes_per_s is not None:
        from_disk = size * cluster.local_gpus / cluster.nvme_bytes_per_s
        seconds = np.where(place == DEVICES.index("nvme"), np.maximum(seconds, from_disk), seconds)
    return np.asarray(np.where(place > 0, seconds, 0.0))


def _per_message(measured: FloatArray, params: FloatArray, message: FloatArray) -> FloatArray:
    """For all ``params`` when each message of ``message`` parameters takes ``measured``."""
    return np.where(params > 0, measured * params / np.maximum(message, 1.0), 0.0)
