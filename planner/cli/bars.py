"""Memory of each pipeline stage and the parts of a step as bars of letters: readable without colour and when piped."""

from __future__ import annotations

from rich.text import Text

from planner.service.why import LOSSES, summands, time_parts
from planner.specs.plan import Breakdown, Estimate, Plan
from planner.units import duration, gib, memory_unit, percent

WIDEST = 44
NARROWEST = 10
BESIDE = 26
"""Columns of a row that are neither label nor bar."""
MAX_ROWS = 10
SMALL_SHARE = 0.005
"""Parts of a step below this share are not worth a row."""

CATEGORIES = (
    # letter, label, colour, components of the breakdown
    ("W", "weights", "blue", ("weights",)),
    ("G", "gradients", "cyan", ("gradients",)),
    ("O", "optimizer", "magenta", ("optimizer",)),
    ("A", "activations", "green", ("activations", "recomputed layer")),
    ("L", "logits and loss", "yellow", ("logits and loss", "final norm")),
    ("B", "buffers", "red", ("buffers", "matrix library workspaces", "backward of one layer", "optimizer temporaries")),
    ("V", "overhead", "white", ()),
)
"""The last one takes every other name."""


def bar_width(columns: int, label: int) -> int:
    """Length of the bars for a terminal of ``columns`` and labels of ``label`` characters."""
    return max(NARROWEST, min(WIDEST, columns - label - BESIDE))


def category(name: str) -> int:
    """Index into CATEGORIES of a memory component's name."""
    for index, (_, _, _, names) in enumerate(CATEGORIES):
        if name in names:
            return index
    return len(CATEGORIES) - 1


def by_category(stage: Breakdown) -> list[float]:
    """Bytes of each category of one stage."""
    sizes = [0.0] * len(CATEGORIES)
    for part in summands(stage):
        sizes[category(part.name)] += part.value
    return sizes


def memory_lines(estimate: Estimate, columns: int) -> list[Text]:
    """One bar a pipeline stage, scaled to the memory limit, equal neighbours merged, and a legend."""
    tree = estimate.memory
    stages = list(tree.children) if tree.combine == "max" and tree.children else [tree]
    rows = _merged([(stage.name, by_category(stage), stage.value) for stage in stages])
    scale = max(estimate.memory_limit_bytes, *(total for _, _, total in rows))
    label_width = max(len(label) for label, _, _ in rows)
    width = bar_width(columns, label_width)
    lines = [_memory_line(label.ljust(label_width), sizes, total, scale, width) for label, sizes, total in rows]
    used = [i for i in range(len(CATEGORIES)) if any(sizes[i] > 0 for _, sizes, _ in rows)]
    legend = Text("  ")
    for index in used:
        letter, name, colour, _ = CATEGORIES[index]
        legend.append(f"{letter} {name}  ", style=colour)
    worst = max(rows, key=lambda row: row[2])[1]
    unit, size = memory_unit(sum(worst))
    detail = ", ".join(f"{CATEGORIES[i][0]} {worst[i] / size:.1f}" for i in used if worst[i] > 0)
    return [*lines, legend, Text(f"  fullest stage, {unit}: {detail}")]


def _memory_line(label: str, sizes: list[float], total: float, scale: float, width: int) -> Text:
    line = Text(f"  {label}  [")
    drawn, reached = 0, 0.0
    for (letter, _, colour, _), size in zip(CATEGORIES, sizes, strict=True):
        reached += size
        upto = min(round(width * reached / scale), width)
        line.append(letter * (upto - drawn), style=colour)
        drawn = upto
    line.append("." * (width - drawn), style="dim")
    return line.append(f"] {gib(total):>10}")


def _merged(rows: list[tuple[str, list[float], float]]) -> list[tuple[str, list[float], float]]:
    """Neighbours that look alike become one row; of very many different ones the first, the worst and the last stay."""
    merged: list[tuple[str, str, list[float], float]] = []
    for name, sizes, total in rows:
        if merged and all(abs(a - b) < 0.005 * max(total, 1) for a, b in zip(merged[-1][2], sizes, strict=True)):
            merged[-1] = (merged[-1][0], name, merged[-1][2], merged[-1][3])
        else:
            merged.append((name, name, sizes, total))
    if len(merged) > MAX_ROWS:
        worst = max(range(len(merged)), key=lambda i: merged[i][3])
        merged = [merged[i] for i in sorted({0, worst, len(merged) - 1})]
    return [(_span(first, last), sizes, total) for first, last, sizes, total in merged]


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last.rsplit(' ', 1)[-1]}"


def time_lines(plan: Plan, columns: int) -> list[Text]:
    """One bar a part of the step, on the slowest stage; parts below half a percent are one row together."""
    total = plan.estimate.time.value
    parts = time_parts(plan)
    rows = [(name, value) for name, value in parts.items() if value >= SMALL_SHARE * total]
    rest = total - sum(value for _, value in rows)
    if rest > 0.001 * total:
        rows.append(("other", rest))
    label = max(len(name) for name, _ in rows)
    width = bar_width(columns, label)
    lines = []
    for name, value in rows:
        bar = "#" * round(width * value / total)
        colour = "yellow" if name in LOSSES else "cyan"
        line = Text(f"  {name.ljust(label)}  [").append(bar, style=colour).append("." * (width - len(bar)), style="dim")
        lines.append(line.append(f"] {duration(value):>8} {percent(value / total):>7}"))
    return lines
