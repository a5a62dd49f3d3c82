"""Which rank is expected on which node and what its groups are, in the framework's own rank order."""

from __future__ import annotations

import numpy as np

from planner.cost.context import CostContext
from planner.render import rank_grids
from planner.render.topology import Axis, Topology
from planner.report.figures.traffic import traffic
from planner.specs.batch import StrategyBatch
from planner.specs.pictures import GroupAxis, RankPlace, TopologyMap
from planner.specs.plan import Plan, PlanDocument

SHOWN_NODES = 16
"""Of more nodes than these the first ones and the last are drawn."""


def topology(document: PlanDocument, plan: Plan, context: CostContext, batch: StrategyBatch) -> TopologyMap:
    """The map of ``plan`` (priced in ``context`` as ``batch``) on the document's cluster."""
    cluster = document.request.cluster
    axes = _axes(rank_grids(document, plan))
    shown = shown_nodes(cluster.nodes)
    ranks = [
        rank
        for node in shown
        for rank in range(node * cluster.local_gpus, min((node + 1) * cluster.local_gpus, cluster.gpus))
    ]
    return TopologyMap(
        axes=tuple(_group_axis(grid, axis) for grid, axis in axes),
        ranks=tuple(
            RankPlace(
                rank=rank,
                node=rank // cluster.local_gpus,
                coordinates={axis.name: grid.coordinate(axis.name, rank) for grid, axis in axes},
            )
            for rank in ranks
        ),
        nodes=cluster.nodes,
        shown_nodes=shown,
        gpus_per_node=cluster.local_gpus,
        domain_gpus=cluster.ranks_per_domain,
        traffic=traffic(plan, context, batch),
    )


def shown_nodes(nodes: int) -> tuple[int, ...]:
    """All nodes, or the first ones and the last."""
    return tuple(range(nodes)) if nodes <= SHOWN_NODES else (*range(SHOWN_NODES - 1), nodes - 1)


def _axes(grids: tuple[Topology, ...]) -> list[tuple[Topology, Axis]]:
    """Axes of more than one rank, fastest first; those of experts behind, without the ones that both grids have."""
    found: dict[str, tuple[Topology, Axis]] = {}
    for grid in grids:
        for axis in grid.axes:
            if axis.size > 1:
                found.setdefault(axis.name, (grid, axis))
    return list(found.values())


def _group_axis(grid: Topology, axis: Axis) -> GroupAxis:
    return GroupAxis(name=axis.name, size=axis.size, shares=axis.meaning, nodes=_nodes_of_a_group(grid, axis))


def _nodes_of_a_group(grid: Topology, axis: Axis) -> int:
    """Most nodes that any group of the axis has ranks on."""
    ranks, step = np.arange(grid.ranks), grid.stride(axis.name)
    first = ranks - ranks // step % axis.size * step
    places = np.unique(np.stack([first, ranks // grid.local_ranks]), axis=1)
    return int(np.unique(places[0], return_counts=True)[1].max())
