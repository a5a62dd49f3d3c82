"""Which rank does what: the coordinates of every rank in the framework's own rank order, and the groups on each node.

Pure arithmetic on the degrees; it says where ranks are expected, the launcher decides whether node numbers follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import InputError
from planner.render.text import table
from planner.specs.cluster import Cluster
from planner.specs.strategy import Strategy

_SHOWN_NODES = 16


@dataclass(frozen=True)
class Axis:
    """One dimension of the rank grid."""

    name: str
    size: int
    meaning: str


@dataclass(frozen=True)
class Topology:
    """Rank grid with the fastest-varying axis first."""

    axes: tuple[Axis, ...]
    local_ranks: int
    """Ranks of one node."""

    @property
    def ranks(self) -> int:
        total = 1
        for axis in self.axes:
            total *= axis.size
        return total

    def stride(self, name: str) -> int:
        """Distance between neighbouring ranks of a group along ``name``."""
        step = 1
        for axis in self.axes:
            if axis.name == name:
                return step
            step *= axis.size
        raise KeyError(name)

    def group(self, name: str, rank: int = 0) -> list[int]:
        """Ranks of the group along ``name`` that ``rank`` belongs to."""
        step = self.stride(name)
        size = next(axis.size for axis in self.axes if axis.name == name)
        first = rank - (rank // step % size) * step
        return [first + index * step for index in range(size)]

    def coordinate(self, name: str, rank: int) -> int:
        """Position of ``rank`` along ``name``."""
        size = next(axis.size for axis in self.axes if axis.name == name)
        return rank // self.stride(name) % size

    def used(self) -> tuple[Axis, ...]:
        """Axes with more than one rank, slowest first; all of them for a single GPU."""
        return tuple(axis for axis in reversed(self.axes) if axis.size > 1) or self.axes[-1:]


def replica_ranks(strategy: Strategy, cluster: Cluster) -> Topology:
    """Tensor, context, data, pipeline: Megatron's default order and nanotron's (parallel/context.py)."""
    return Topology(
        (
            Axis("tp", strategy.tp, "one layer's matrices"),
            Axis("cp", strategy.cp, "one sequence"),
            Axis("dp", strategy.dp, "gradients and optimizer states"),
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


def group_table(topology: Topology) -> str:
    """A Markdown table of the groups: size, the group of rank 0, nodes it spans."""
    rows = [["group", "size", "ranks of the first group", "stride", "nodes it spans", "what it shares"]]
    for axis in topology.used():
        ranks = topology.group(axis.name)
        shown = (
            ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ..., {ranks[-1]}"
        )
        nodes = len({rank // topology.local_ranks for rank in ranks})
        rows.append([axis.name, str(axis.size), shown, str(topology.stride(axis.name)), str(nodes), axis.meaning])
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
                *(_span([topology.coordinate(a.name, r) for r in ranks]) for a in axes),
            ]
        )
    return table(rows)
