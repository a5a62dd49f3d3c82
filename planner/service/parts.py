"""What memory and step time consist of, grouped for people: the terms of a stage, stages that look alike, the parts of
a step worth naming.

The terminal, the page and the report draw these same groups, so that they never tell two stories of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.specs.pictures import PartKind
from planner.specs.plan import Breakdown, Estimate, Plan


class MemoryTerm(NamedTuple):
    """A share of a GPU's memory that is drawn as one."""

    name: str
    letter: str
    """Stands for the name in every bar, whatever else the bar holds."""
    components: tuple[str, ...]
    """Of the breakdown."""


MEMORY_TERMS = (
    MemoryTerm("weights", "W", ("weights", "gathered weights")),
    MemoryTerm("gradients", "G", ("gradients",)),
    MemoryTerm("optimizer", "O", ("optimizer",)),
    MemoryTerm("activations", "A", ("activations", "recomputed layer", "prediction blocks")),
    MemoryTerm("logits and loss", "L", ("logits and loss", "final norm")),
    MemoryTerm(
        "buffers", "B", ("buffers", "matrix library workspaces", "backward of one layer", "optimizer temporaries")
    ),
    MemoryTerm("overhead", "V", ()),
)
"""In the order of every bar and legend, and in that of the colours; the last one takes every other component."""

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
RECOMPUTATION = "recomputation"


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
    for index, term in enumerate(MEMORY_TERMS):
        if name in term.components:
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


def summands(node: Breakdown) -> tuple[Breakdown, ...]:
    """What a quantity is the sum of; where it is a maximum, the summands of the largest child."""
    while node.combine == "max" and node.children:
        node = max(node.children, key=lambda child: child.value)
    return node.children or (node,)


def time_parts(plan: Plan) -> dict[str, float]:
    """Seconds of the named parts of a step down to the leaves, in the order of the breakdown."""
    parts: dict[str, float] = {}
    waiting = list(summands(plan.estimate.time))
    while waiting:
        node = waiting.pop(0)
        if node.combine == "sum" and node.children:
            waiting = [*node.children, *waiting]
        else:
            parts[node.name] = parts.get(node.name, 0.0) + node.value
    return parts


def named_parts(plan: Plan) -> list[tuple[str, float]]:
    """(name, seconds) of the parts of a step in order, small ones together as ``other``.

    Negative where a step is shorter than its slowest stage alone would make it (ranks that share cores)."""
    total = plan.estimate.time.value
    rows = [(name, value) for name, value in time_parts(plan).items() if abs(value) >= SMALL_SHARE * total]
    rest = total - sum(value for _, value in rows)
    return [*rows, (REST, rest)] if rest > REST_SHARE * total else rows


def part_kind(name: str) -> PartKind:
    """What the GPU does in a part of the step: the model's own arithmetic where nothing else is known of the name."""
    if name in _WAITING:
        return "waiting"
    if name in _UPDATE:
        return "update"
    if name in (RECOMPUTATION, REST):
        return "recomputation" if name == RECOMPUTATION else "mixed"
    return "communication" if name.endswith(" traffic") else "arithmetic"


def seconds_by_kind(plan: Plan) -> dict[PartKind, float]:
    """Seconds of a step by what the GPU does, small parts included; they add up to the step."""
    sums: dict[PartKind, float] = {}
    for name, seconds in time_parts(plan).items():
        kind = part_kind(name)
        sums[kind] = sums.get(kind, 0.0) + seconds
    return sums


def losses(plan: Plan) -> dict[str, float]:
    """Seconds of every part of a step that is not the model's own arithmetic, largest first."""
    found = [(name, seconds) for name, seconds in time_parts(plan).items() if part_kind(name) != "arithmetic"]
    return dict(sorted(found, key=lambda part: -abs(part[1])))
