"""Memory of the pipeline stages by term, and the parts of a step one behind the other."""

from __future__ import annotations

from planner.service.parts import MEMORY_TERMS, REST, named_parts, part_kind, stage_rows
from planner.service.why import time_parts
from planner.specs.pictures import PartKind, StageMemory, Term, TimePart
from planner.specs.plan import Estimate, Plan


def stages(estimate: Estimate) -> tuple[StageMemory, ...]:
    """Every stage, neighbours that look alike together; terms of no size are left out."""
    return tuple(
        StageMemory(
            first_stage=row.first,
            last_stage=row.last,
            terms=tuple(
                Term(name=name, value=size)
                for (name, _), size in zip(MEMORY_TERMS, row.sizes, strict=True)
                if size != 0.0
            ),
            total_bytes=row.total,
        )
        for row in stage_rows(estimate)
    )


def waterfall(plan: Plan) -> tuple[TimePart, ...]:
    """The parts of a step from its start to its end, small ones together at the end."""
    parts, reached = [], 0.0
    named = named_parts(plan)
    for name, seconds in named:
        kind = _kind_of_rest(plan, {known for known, _ in named}) if name == REST else part_kind(name)
        parts.append(TimePart(name=name, kind=kind, start_s=reached, seconds=seconds))
        reached += seconds
    return tuple(parts)


def _kind_of_rest(plan: Plan, named: set[str]) -> PartKind:
    """That of most of its time."""
    sums: dict[PartKind, float] = {}
    for name, seconds in time_parts(plan).items():
        if name not in named:
            kind = part_kind(name)
            sums[kind] = sums.get(kind, 0.0) + seconds
    return max(sums, key=lambda kind: sums[kind])
