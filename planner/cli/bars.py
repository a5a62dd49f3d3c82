"""Memory of each pipeline stage and the parts of a step as bars of letters: readable without colour and when piped."""

from __future__ import annotations

from rich.text import Text

from planner.service.parts import MEMORY_TERMS, StageRow, named_parts, part_kind, stage_rows
from planner.specs.plan import Estimate, Plan
from planner.units import duration, gib, memory_unit, percent

WIDEST = 44
NARROWEST = 10
BESIDE = 26
"""Columns of a row that are neither label nor bar."""
MAX_ROWS = 10

COLOURS = ("blue", "cyan", "magenta", "green", "yellow", "red", "white")
"""Of MEMORY_TERMS, in their order."""


def bar_width(columns: int, label: int) -> int:
    """Length of the bars for a terminal of ``columns`` and labels of ``label`` characters."""
    return max(NARROWEST, min(WIDEST, columns - label - BESIDE))


def memory_lines(estimate: Estimate, columns: int) -> list[Text]:
    """One bar a pipeline stage, scaled to the memory limit, equal neighbours merged, and a legend."""
    rows = _shown(stage_rows(estimate))
    labels = [_label(row, estimate) for row in rows]
    scale = max(estimate.memory_limit_bytes, *(row.total for row in rows))
    label_width = max(map(len, labels))
    width = bar_width(columns, label_width)
    lines = [_memory_line(label.ljust(label_width), row, scale, width) for label, row in zip(labels, rows, strict=True)]
    used = [i for i in range(len(MEMORY_TERMS)) if any(row.sizes[i] > 0 for row in rows)]
    legend = Text("  ")
    for index in used:
        legend.append(f"{MEMORY_TERMS[index].letter} {MEMORY_TERMS[index].name}  ", style=COLOURS[index])
    worst = max(rows, key=lambda row: row.total).sizes
    unit, size = memory_unit(sum(worst))
    detail = ", ".join(f"{MEMORY_TERMS[i].letter} {worst[i] / size:.1f}" for i in used if worst[i] > 0)
    return [*lines, legend, Text(f"  fullest stage, {unit}: {detail}")]


def _memory_line(label: str, row: StageRow, scale: float, width: int) -> Text:
    line = Text(f"  {label}  [")
    drawn, reached = 0, 0.0
    for term, colour, size in zip(MEMORY_TERMS, COLOURS, row.sizes, strict=True):
        reached += size
        upto = min(round(width * reached / scale), width)
        line.append(term.letter * (upto - drawn), style=colour)
        drawn = upto
    line.append("." * (width - drawn), style="dim")
    return line.append(f"] {gib(row.total):>10}")


def _shown(rows: list[StageRow]) -> list[StageRow]:
    """Of very many different stages the first, the worst and the last."""
    if len(rows) <= MAX_ROWS:
        return rows
    worst = max(range(len(rows)), key=lambda i: rows[i].total)
    return [rows[i] for i in sorted({0, worst, len(rows) - 1})]


def _label(row: StageRow, estimate: Estimate) -> str:
    """``stage 0``, ``stage 1 to 6``; a tree without stages is called by its own name."""
    if estimate.memory.combine != "max":
        return estimate.memory.name
    return f"stage {row.first}" if row.first == row.last else f"stage {row.first} to {row.last}"


def time_lines(plan: Plan, columns: int) -> list[Text]:
    """One bar a part of the step, on the slowest stage; parts below half a percent are one row together."""
    total = plan.estimate.time.value
    rows = [(name, value) for name, value in named_parts(plan) if value > 0]
    label = max(len(name) for name, _ in rows)
    width = bar_width(columns, label)
    lines = []
    for name, value in rows:
        bar = "#" * round(width * value / total)
        colour = "cyan" if part_kind(name) == "arithmetic" else "yellow"
        line = Text(f"  {name.ljust(label)}  [").append(bar, style=colour).append("." * (width - len(bar)), style="dim")
        lines.append(line.append(f"] {duration(value):>8} {percent(value / total):>7}"))
    return lines
