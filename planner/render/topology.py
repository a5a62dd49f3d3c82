"""Which rank does what: the coordinates of every rank in the framework's own rank order, and the groups on each node.

Pure arithmetic on the degrees; it says where ranks are expected, the launcher decides whether node numbers follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

import numpy as np

from planner.errors import InputError
from planner.render.text import table
from planner.specs.batch import IntArray
from planner.specs.cluster import Cluster
from planner.specs.strategy import Strategy

_SHOWN_NODES = 16
MOST_RANKS = 8
"""Of a group that are written one by one."""


Ranks = TypeVar("Ranks", int, IntArray)
"""One rank or many."""
BATCH = "the batch: each has other sequences"
"""What data ranks share with each other where the ranks of a sequence share the rest, too."""


@dataclass(frozen=True)
class Axis:
    """One dimension of the rank grid."""

    name: str
    size: int
    meaning: str
    """What its groups share."""
    over: str = ""
    """The axis next to it whose ranks share that, too: with both of them the group is that of both."""


@dataclass(frozen=True)
class GroupKind:
    """Groups of one kind: every ``stride``-th rank, ``size`` of them."""

    name: str
    size: int
    stride: int
    meaning: str

    def first(self, rank: Ranks) -> Ranks:
        """The lowest rank of the group that ``rank`` belongs to."""
        return rank - self.coordinate(rank) * self.stride

    def ranks(self, rank: int = 0) -> list[int]:
        """The group that ``rank`` belongs to."""
        return [self.first(rank) + index * self.stride for index in range(self.size)]

    def coordinate(self, rank: Ranks) -> Ranks:
        """Position of ``rank`` in its group."""
        return rank // self.stride % self.size

    def number(self, rank: Ranks) -> Ranks:
        """Number of the group of ``rank``: groups are counted in the order of their lowest ranks."""
        return rank // (self.stride * self.size) * self.stride + rank % self.stride


@dataclass(frozen=True)
class Topology:
    """Rank grid with the fastest-varying axis first."""

    axes: tuple[Axis, ...]
    local_ranks: int
    """Ranks of one node."""

    @property
    def ranks(self) -> int:
        return prod(axis.size for axis in self.axes)

    def kinds(self) -> tuple[GroupKind, ...]:
        """Every kind of group, fastest first: one an axis, and one of two axes behind the axis that names another."""
        found: dict[str, GroupKind] = {}
        step = 1
        for axis in self.axes:
            found[axis.name] = GroupKind(axis.name, axis.size, step, axis.meaning)
            step *= axis.size
            inner = found.get(axis.over)
            if inner is not None and inner.size > 1:
                found[axis.name] = replace(found[axis.name], meaning=BATCH)
                name = f"{axis.name} x {axis.over}"
                found[name] = GroupKind(name, inner.size * axis.size, inner.stride, axis.meaning)
        return tuple(found.values())

    def groups(self) -> tuple[GroupKind, ...]:
        """Kinds of groups with more than one rank, slowest first."""
        return tuple(kind for kind in reversed(self.kinds()) if kind.size > 1)

    def kind(self, name: str) -> GroupKind:
        """The groups called ``name``."""
        return next(kind for kind in self.kinds() if kind.name == name)

    def nodes_of_a_group(self, kind: GroupKind) -> int:
        """Most nodes that any group of the kind has ranks on: one may straddle a border that the first does not."""
        ranks = np.arange(self.ranks)
        places = np.unique(np.stack([kind.number(ranks), ranks // self.local_ranks]), axis=1)
        return int(np.unique(places[0], return_counts=True)[1].max(initial=1))

    def used(self) -> tuple[Axis, ...]:
        """Axes with more than one rank, slowest first; all of them for a single GPU."""
        return tuple(axis for axis in reversed(self.axes) if axis.size > 1) or self.axes[-1:]


def replicas_share(strategy: Strategy, ranks: int, of: str = "") -> str:
    """What ``ranks`` with the same weights share where optimizer states are sharded over all, some or none of them;
    ``of`` says which weights."""
    states = max(1, ranks * strategy.shard_degree // (strategy.dp * strategy.cp))
    if states == ranks > 1:
        return f"gradients and optimizer states{of}"
    return f"gradients{of}" + (f"; optimizer states by parts of {states} GPUs" if states > 1 else "")


def replica_ranks(strategy: Strategy, cluster: Cluster) -> Topology:
    """Tensor, context, data, pipeline: Megatron's default order and nanotron's (parallel/context.py)."""
    return Topology(
        (
            Axis("tp", strategy.tp, "one layer's matrices"),
            Axis("cp", strategy.cp, "one sequence"),
            Axis("dp", strategy.dp, replicas_share(strategy, strategy.dp * strategy.cp), over="cp"),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def mesh_degrees(strategy: Strategy) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of a mesh; the shard group is dp_shard times the context-parallel ranks."""
    if strategy.shard_degree % strategy.cp or strategy.dp * strategy.cp % strategy.shard_degree:
        raise InputError(
            f"shard_degree({strategy.shard_degree}) must be a multiple of cp({strategy.cp}) and divide "
            f"dp({strategy.dp}) * cp({strategy.cp})",
            where="strategy.shard_degree",
        )
    shard = strategy.shard_degree // strategy.cp
    return strategy.dp // shard, shard


def _span(values: Sequence[int]) -> str:
    """``3``, ``0-7`` or ``0,2`` for the distinct values."""
    distinct = sorted(set(values))
    if len(distinct) == 1:
        return str(distinct[0])
    if distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"{distinct[0]}-{distinct[-1]}"
    return ",".join(map(str, distinct))


def ranks_text(size: int, stride: int) -> str:
    """The ranks of the first group; of many the first ones and the last."""
    shown = range(size) if size <= MOST_RANKS else (0, 1, 2, size - 1)
    ranks = [str(index * stride) for index in shown]
    return ", ".join(ranks if size <= MOST_RANKS else [*ranks[:-1], "...", ranks[-1]])


def group_table(topology: Topology) -> str:
    """A Markdown table of the groups: size, the group of rank 0, nodes it spans."""
    rows = [["group", "size", "ranks of the first group", "stride", "nodes it spans", "what it shares"]]
    for kind in topology.groups() or topology.kinds()[-1:]:
        nodes = topology.nodes_of_a_group(kind)
        ranks = ranks_text(kind.size, kind.stride)
        rows.append([kind.name, str(kind.size), ranks, str(kind.stride), str(nodes), kind.meaning])
    return table(rows)


def node_table(topology: Topology) -> str:
    """A Markdown table with one row a node; long lists show the first nodes and the last."""
    nodes = -(-topology.ranks // topology.local_ranks)
    axes = topology.used()
    rows = [["node", "ranks", *(axis.name for axis in axes)]]
    shown = list(range(nodes)) if nodes <= _SHOWN_NODES else [*range(_SHOWN_NODES - 1), nodes - 1]
    for node in shown:
        first = node * topology.local_ranks
        ranks = range(first, min(first + topology.local_ranks, topology.ranks))
        if node == nodes - 1 and nodes > _SHOWN_NODES:
            rows.append(["..."] * len(rows[0]))
        rows.append(
            [
                str(node),
                f"{ranks[0]}-{ranks[-1]}",
                *(_span([topology.kind(a.name).coordinate(r) for r in ranks]) for a in axes),
            ]
        )
    return table(rows)
