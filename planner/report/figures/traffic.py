"""What one GPU sends in a step to each kind of group, over which links, and how much of the step it costs."""

from __future__ import annotations

from planner.cost.context import CostContext
from planner.cost.volumes import Volume, volumes
from planner.service.parts import time_parts
from planner.specs.batch import StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.pictures import LinkLevel, Traffic
from planner.specs.plan import Plan

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    # axis: what travels, parts of the step that wait for it
    "tp": (
        "activations around every block that is split",
        ("tensor-parallel traffic", "embedding traffic", "head traffic", "logits traffic"),
    ),
    "cp": ("keys and values of attention", ("context-parallel traffic",)),
    "ep": ("tokens on their way to experts and back", ("expert-parallel traffic",)),
    "pp": ("activations to the next stage, gradients back", ("stage-to-stage traffic",)),
    "dp": (
        "gradients and sharded parameters",
        ("parameter and gradient traffic", "exposed gradient traffic"),
    ),
}

OF_EXPERTS = ", of experts in their own groups"


def traffic(plan: Plan, context: CostContext, batch: StrategyBatch) -> tuple[Traffic, ...]:
    """One row for each kind of group that sends anything."""
    parts = time_parts(plan)
    rows = []
    for volume in volumes(context, batch):
        what, names = _KINDS[volume.axis]
        rows.append(
            Traffic(
                axis="dp x cp" if volume.axis == "dp" and plan.strategy.cp > 1 else volume.axis,
                level=_level(volume, context.cluster),
                what=what + (OF_EXPERTS if volume.axis == "dp" and plan.strategy.ep > 1 else ""),
                sent_bytes_per_gpu=volume.sent_bytes,
                exposed_s=sum(parts.get(name, 0.0) for name in names),
            )
        )
    return tuple(rows)


def _level(volume: Volume, cluster: Cluster) -> LinkLevel:
    """The slowest links that any of the groups crosses."""
    if any(group.leaves(cluster.ranks_per_domain)[0] for group in volume.groups):
        return "network"
    return "domain" if any(group.leaves(cluster.local_gpus)[0] for group in volume.groups) else "node"
