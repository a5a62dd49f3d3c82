"""Gradient and parameter traffic of data parallelism, once a step or in every micro-batch, by sharding stage.

Stage 0 all-reduces gradients once a step, stage 1 scatters gradients and gathers parameters once a step, stage 2
scatters them in every micro-batch (and gathers parameters once a step, or in every forward pass where the framework
frees them after the backward pass), stage 3 also gathers every layer's parameters forward and backward in every
micro-batch.  Parameters offloaded to the host cross its link on the way to every gather."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.collectives import Group
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
    """Seconds of one layer's data-parallel traffic."""

    once: FloatArray
    """Once a step, to be hidden behind the last backward and first forward pass."""
    forward: FloatArray
    """In every micro-batch, beside the forward pass of a neighbouring layer."""
    backward: FloatArray


def traffic(work: Work, groups: Groups, weights: Weights) -> LayerTraffic:
    """Traffic of ``weights``, dense and expert parts in their own groups."""
    shard = np.maximum(work.batch.shard_degree, 1)
    dense = _traffic(
        work,
        (groups.shard, groups.regather, groups.data, groups.replica),
        shard < groups.data.size,
        shard,
        weights.dense,
        weights.trained.dense,
    )
    if work.context.model.moe is None or not np.any(weights.expert):
        return dense
    # Expert weights are reduced over their own replicas; without expert parallelism those are the dense ones.
    expert = _traffic(
        work,
        (groups.expert_shard, groups.expert_regather, groups.expert_data, groups.expert_replica),
        work.expert_shard_degree < work.expert_group,
        work.expert_shard_degree,
        weights.expert,
        weights.trained.expert,
    )
    return LayerTraffic(dense.once + expert.once, dense.forward + expert.forward, dense.backward + expert.backward)


def _traffic(
    work: Work,
    groups: tuple[Group, Group, Group, Group],
    hybrid: BoolArray,
    degree: IntArray,
    params: FloatArray,
    trained: FloatArray,
) -> LayerTraffic:
    """``groups`` are those of the shards, of the backward gather, of all replicas and of the copies of a shard.

    Sharded ``params`` are gathered for compute; only ``trained`` ones (the same, or adapters beside frozen ones) are
    reduced, and gathered again after the optimizer has changed them."""
    shard, regather, data, replica = groups
    habits, stage = work.context.backend.habits, work.traffic_stage
    gradient = habits.gradient_reduce_bytes(work.context.job)
    parameter = work.context.job.compute_bytes
    per_layer = habits.data_parallel_overlap == "every-layer"
    bucket = np.full(len(params), habits.bucket_params)
    message, changed = (params, trained) if per_layer else (bucket, bucket)
    scatter = _per_message(shard.all_gather_s(gradient * changed), trained, changed)
    gather = _per_message(shard.all_gather_s(parameter * message), params, message)
    again = _per_message(regather.all_gather_s(parameter * message), params, message)
    renew = _per_message(shard.all_gather_s(parameter * changed), trained, changed)
    reduce = _per_message(data.all_reduce_s(gradient * changed), trained, changed)
    across = np.where(hybrid, _per_message(replica.all_reduce_s(gradient * changed / degree), trained, changed), 0.0)
    from_host = _host_gather_s(work, params / degree)
    gather, again, renew = (np.maximum(seconds, from_host) for seconds in (gather, again, renew))
    repeated = habits.gathers_every_micro_batch & (stage == 2)
    # Nested np.where: np.select takes several times as long on the short arrays of a search.
    once = np.where(stage == 1, scatter + renew + across, np.where((stage == 2) & ~repeated, renew, 0.0))
    once = np.where(stage == 0, reduce, once)
    forward = np.where((stage == 3) | repeated, gather, 0.0)
    backward = np.where(stage >= 2, scatter + across, 0.0) + np.where(stage == 3, again, 0.0)
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


def _per_message(seconds: FloatArray, params: FloatArray, message: FloatArray) -> FloatArray:
    """Seconds for ``params`` when messages of ``message`` parameters take ``seconds`` each."""
    return np.where(params > 0, seconds * params / np.maximum(message, 1.0), 0.0)
