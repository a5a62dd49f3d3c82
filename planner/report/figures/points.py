"""Every plan of a document as a point of step time against memory, and which of them nothing drawn beats."""

from __future__ import annotations

from collections.abc import Iterator

from planner.service.words import mesh_words
from planner.specs.pictures import PlanPoint
from planner.specs.plan import Plan, PlanDocument


def points(document: PlanDocument) -> tuple[PlanPoint, ...]:
    """The best plan, the alternatives in their order, then the best of other frameworks; no plan twice."""
    plans = list(_distinct(document))
    return tuple(
        PlanPoint(
            rank=rank,
            backend=plan.backend,
            label=mesh_words(plan.strategy),
            step_time_s=plan.estimate.step_time_s,
            step_time_range_s=plan.estimate.step_time_range_s,
            peak_memory_bytes=plan.estimate.peak_memory_bytes,
            peak_memory_upper_bytes=plan.estimate.peak_memory_range_bytes[1],
            on_frontier=not any(_beats(other, plan) for other in plans),
        )
        for rank, plan in enumerate(plans, start=1)
    )


def _distinct(document: PlanDocument) -> Iterator[Plan]:
    seen = set()
    for plan in (document.best, *document.alternatives, *document.by_backend.values()):
        if plan is not None:
            key = (plan.backend, plan.strategy.model_dump_json())
            if key not in seen:
                seen.add(key)
                yield plan


def _beats(other: Plan, plan: Plan) -> bool:
    """Nowhere worse, and better in one of the two."""
    theirs = (other.estimate.step_time_s, other.estimate.peak_memory_bytes)
    mine = (plan.estimate.step_time_s, plan.estimate.peak_memory_bytes)
    return theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True))
