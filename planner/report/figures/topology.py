"""Which rank is expected on which node and what its groups are, in the framework's own rank order."""

from __future__ import annotations

from planner.cost.context import CostContext
from planner.render import rank_grids
from planner.render.topology import GroupKind, Topology
from planner.report.figures.traffic import traffic
from planner.specs.batch import StrategyBatch
from planner.specs.pictures import GroupAxis, RankPlace, TopologyMap
from planner.specs.plan import Plan, PlanDocument

SHOWN_NODES = 16
"""Of more nodes than these the first ones and the last are drawn."""


def topology(document: PlanDocument, plan: Plan, context: CostContext, batch: StrategyBatch) -> TopologyMap:
    """The map of ``plan`` (priced in ``context`` as ``batch``) on the document's cluster."""
    cluster = document.request.cluster
    grids = rank_grids(document, plan)
    kinds = _kinds(grids)
    dimensions = {axis.name for grid in grids for axis in grid.axes}
    shown = shown_nodes(cluster.nodes)
    ranks = [
        rank
        for node in shown
        for rank in range(node * cluster.local_gpus, min((node + 1) * cluster.local_gpus, cluster.gpus))
    ]
    return TopologyMap(
        axes=tuple(
            GroupAxis(
                name=kind.name,
                size=kind.size,
                stride=kind.stride,
                shares=kind.meaning,
                nodes=grids[0].nodes_of_a_group(kind),
            )
            for kind in kinds
        ),
        ranks=tuple(
            RankPlace(
                rank=rank,
                node=rank // cluster.local_gpus,
                coordinates={kind.name: kind.coordinate(rank) for kind in kinds if kind.name in dimensions},
                groups={kind.name: kind.number(rank) for kind in kinds},
            )
            for rank in ranks
        ),
        nodes=cluster.nodes,
        shown_nodes=shown,
        gpus_per_node=cluster.local_gpus,
        domain_gpus=cluster.ranks_per_domain,
        built_domain_gpus=cluster.domain_gpus,
        traffic=traffic(plan, context, batch),
    )


def shown_nodes(nodes: int) -> tuple[int, ...]:
    """All nodes, or the first ones and the last."""
    return tuple(range(nodes)) if nodes <= SHOWN_NODES else (*range(SHOWN_NODES - 1), nodes - 1)


def _kinds(grids: tuple[Topology, ...]) -> tuple[GroupKind, ...]:
    """Groups of more than one rank, fastest first; those of experts behind, without the ones that both grids have."""
    found: dict[str, GroupKind] = {}
    for grid in grids:
        for kind in reversed(grid.groups()):
            found.setdefault(kind.name, kind)
    return tuple(found.values())
