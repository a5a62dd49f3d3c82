"""Which ranks talk to which: the process groups of every parallel dimension, placed in rank order tp, cp, ep, dp, pp.

Tensor parallelism is the innermost dimension and pipeline the outermost, as Megatron-LM, DeepSpeed's topology and a
PyTorch device mesh all number them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from planner.cost.collectives import Group, group
from planner.cost.context import Work
from planner.specs.batch import IntArray


class Groups:
    """The process groups of N candidates, built when first used."""

    def __init__(self, work: Work) -> None:
        self._context = work.context
        self._work = work
        self._batch = work.batch

    def _ones(self) -> IntArray:
        return np.ones(len(self._batch), dtype=np.int64)

    @cached_property
    def tensor(self) -> Group:
        return group(self._context, self._batch.tp, self._ones())

    @cached_property
    def context(self) -> Group:
        return group(self._context, self._batch.cp, self._batch.tp)

    @cached_property
    def expert(self) -> Group:
        return group(self._context, self._batch.ep, self._batch.etp)

    @cached_property
    def expert_tensor(self) -> Group:
        return group(self._context, self._batch.etp, self._ones())

    @cached_property
    def shard(self) -> Group:
        """Ranks that share the sharded states of dense weights (context-parallel ranks included)."""
        return group(self._context, self._batch.shard_degree, self._batch.tp)

    @cached_property
    def regather(self) -> Group:
        """Ranks from which the backward pass gathers parameters: the second, nearer shard where there is one."""
        second = self._batch.secondary_shard_degree
        return group(self._context, np.where(second > 0, second, self._batch.shard_degree), self._batch.tp)

    @cached_property
    def replica(self) -> Group:
        """Ranks that hold the same shard where sharding is hybrid."""
        degree = np.maximum(self._batch.dp * self._batch.cp // self._batch.shard_degree, 1)
        return group(self._context, degree, self._batch.tp * self._batch.shard_degree)

    @cached_property
    def data(self) -> Group:
        """All ranks that hold the same dense weights."""
        return group(self._context, self._batch.dp * self._batch.cp, self._batch.tp)

    @cached_property
    def expert_data(self) -> Group:
        """All ranks that hold the same expert weights."""
        degree = self._work.expert_group.astype(np.int64)
        return group(self._context, degree, self._batch.etp * self._batch.ep)

    @cached_property
    def expert_shard(self) -> Group:
        """Ranks that share the sharded states of expert weights."""
        return group(self._context, self._work.expert_shard_degree, self._batch.etp * self._batch.ep)

    @cached_property
    def expert_regather(self) -> Group:
        """The nearer shard of expert weights, where dense weights have one."""
        second, shard = self._batch.secondary_shard_degree, self._work.expert_shard_degree
        near = np.maximum(np.minimum(shard, second * shard // self._batch.shard_degree), 1)
        return group(self._context, np.where(second > 0, near, shard), self._batch.etp * self._batch.ep)

    @cached_property
    def expert_replica(self) -> Group:
        """Ranks that hold the same shard of expert weights where sharding is hybrid."""
        shard = self._work.expert_shard_degree
        degree = np.maximum(self._work.expert_group.astype(np.int64) // shard, 1)
        return group(self._context, degree, self._batch.etp * self._batch.ep * shard)

    @cached_property
    def pipeline(self) -> Group:
        return group(self._context, self._batch.pp, self._batch.tp * self._batch.cp * self._batch.dp)
