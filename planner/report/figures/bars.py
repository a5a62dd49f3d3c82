"""Memory of the pipeline stages by term, and the parts of a step one behind the other."""

from __future__ import annotations

from planner.service.parts import MEMORY_TERMS, named_parts, part_kind, stage_rows
from planner.specs.pictures import StageMemory, Term, TimePart
from planner.specs.plan import Estimate, Plan


def stages(estimate: Estimate) -> tuple[StageMemory, ...]:
    """Every stage, neighbours that look alike together; terms of no size are left out."""
    return tuple(
        StageMemory(
            first_stage=row.first,
            last_stage=row.last,
            terms=tuple(
                Term(name=term.name, value=size)
                for term, size in zip(MEMORY_TERMS, row.sizes, strict=True)
                if size != 0.0
            ),
            total_bytes=row.total,
        )
        for row in stage_rows(estimate)
    )


def waterfall(plan: Plan) -> tuple[TimePart, ...]:
    """The parts of a step from its start to its end, small ones together at the end."""
    parts, reached = [], 0.0
    for name, seconds in named_parts(plan):
        parts.append(TimePart(name=name, kind=part_kind(name), start_s=reached, seconds=seconds))
        reached += seconds
    return tuple(parts)
