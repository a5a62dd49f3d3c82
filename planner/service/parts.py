"""What memory and step time consist of, grouped for people: the terms of a stage, stages that look alike, the parts of
a step worth naming.

The terminal, the page and the report draw these same groups, so that they never tell two stories of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.service.why import summands, time_parts
from planner.specs.pictures import PartKind
from planner.specs.plan import Breakdown, Estimate, Plan

MEMORY_TERMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # label, components of the breakdown
    ("weights", ("weights", "gathered weights")),
    ("gradients", ("gradients",)),
    ("optimizer", ("optimizer",)),
    ("activations", ("activations", "recomputed layer", "prediction blocks")),
    ("logits and loss", ("logits and loss", "final norm")),
    ("buffers", ("buffers", "matrix library workspaces", "backward of one layer", "optimizer temporaries")),
    ("overhead", ()),
)
"""The last one takes every other name."""

ALIKE = 0.005
"""Neighbouring stages whose terms differ by less than this share of the stage are drawn as one."""
SMALL_SHARE = 0.005
"""Parts of a step below this share are not worth a bar of their own."""
REST_SHARE = 0.001
"""Nor is what is left of the step, below this share."""
REST = "other"

_WAITING = frozenset(
    (
        "pipeline bubble",
        "cores of waiting stages",
        "kernel launches",
        "launch gaps",
        "routing waits",
        "waiting for the slowest GPU",
    )
)
_UPDATE = frozenset(("optimizer", "host optimizer", "once a step"))


@dataclass(frozen=True)
class StageRow:
    """Pipeline stages ``first`` to ``last``, which look alike."""

    first: int
    last: int
    sizes: tuple[float, ...]
    """Bytes of each of MEMORY_TERMS."""
    total: float


def memory_term(name: str) -> int:
    """Index into MEMORY_TERMS of a memory component's name."""
    for index, (_, names) in enumerate(MEMORY_TERMS):
        if name in names:
            return index
    return len(MEMORY_TERMS) - 1


def term_bytes(stage: Breakdown) -> tuple[float, ...]:
    """Bytes of each of MEMORY_TERMS in the largest phase of one stage; they add up to the stage."""
    sizes = [0.0] * len(MEMORY_TERMS)
    for part in summands(stage):
        sizes[memory_term(part.name)] += part.value
    return tuple(sizes)


def stage_rows(estimate: Estimate) -> list[StageRow]:
    """Every pipeline stage in order, neighbours that look alike as one row."""
    tree = estimate.memory
    rows: list[StageRow] = []
    for index, stage in enumerate(tree.children if tree.combine == "max" and tree.children else (tree,)):
        sizes = term_bytes(stage)
        if rows and _alike(rows[-1], sizes, stage.value):
            rows[-1] = StageRow(rows[-1].first, index, rows[-1].sizes, rows[-1].total)
        else:
            rows.append(StageRow(index, index, sizes, stage.value))
    return rows


def _alike(row: StageRow, sizes: Sequence[float], total: float) -> bool:
    return all(abs(a - b) < ALIKE * max(total, 1) for a, b in zip(row.sizes, sizes, strict=True))


def named_parts(plan: Plan) -> list[tuple[str, float]]:
    """(name, seconds) of the parts of a step in order, small ones together as ``other``.

    Negative where a step is shorter than its slowest stage alone would make it (ranks that share cores)."""
    total = plan.estimate.time.value
    rows = [(name, value) for name, value in time_parts(plan).items() if abs(value) >= SMALL_SHARE * total]
    rest = total - sum(value for _, value in rows)
    return [*rows, (REST, rest)] if rest > REST_SHARE * total else rows


def part_kind(name: str) -> PartKind:
    """What the GPU does in a part of the step: its own arithmetic where nothing else is known of the name."""
    if name in _WAITING:
        return "waiting"
    if name in _UPDATE:
        return "update"
    return "communication" if name.endswith(" traffic") else "arithmetic"
