"""The numbers behind every picture of a plan document; drawing them is somebody else's work."""

from __future__ import annotations

from planner.report.figures.bars import stages, waterfall
from planner.report.figures.points import points
from planner.report.figures.schedule import schedule
from planner.report.figures.topology import topology
from planner.service.parts import seconds_by_kind
from planner.service.profiles import context_of
from planner.specs.convert import from_strategy
from planner.specs.pictures import Pictures
from planner.specs.plan import Plan, PlanDocument

__all__ = ["pictures"]


def pictures(document: PlanDocument, plan: Plan | None = None) -> Pictures:
    """What is drawn of ``document``: all of its plans as points, and one of them (the best by default) in detail."""
    plan = plan or document.best
    context = context_of(document.request, plan.backend)
    batch = from_strategy(plan.strategy, context.recompute_kinds)
    return Pictures(
        memory_limit_bytes=plan.estimate.memory_limit_bytes,
        points=points(document),
        stages=stages(plan.estimate),
        time=waterfall(plan),
        kinds=seconds_by_kind(plan),
        schedule=schedule(context, batch, plan.strategy),
        topology=topology(document, plan, context, batch),
    )
