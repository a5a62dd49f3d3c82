"""Memory of each pipeline stage and the parts of a step as bars of letters: readable without colour and when piped."""

from __future__ import annotations

from rich.text import Text

from planner.specs.plan import Breakdown, Estimate
from planner.units import GIB, duration, gib, percent

WIDTH = 44
MAX_ROWS = 10

CATEGORIES = (
    # letter, label, colour, beginnings of the names that belong to it
    ("W", "weights", "blue", ("weight", "param")),
    ("G", "gradients", "cyan", ("grad",)),
    ("O", "optimizer", "magenta", ("optim", "master", "moment")),
    ("A", "activations", "green", ("activ",)),
    ("L", "logits and loss", "yellow", ("logit", "loss", "head")),
    ("B", "buffers", "red", ("buffer", "gather", "bucket", "working", "transient", "step", "dispatch")),
    ("V", "overhead", "white", ()),
)
"""The last one takes every other name."""


def category(name: str) -> int:
    """Index into CATEGORIES of a memory component's name."""
    lowered = name.lower()
    for index, (_, _, _, beginnings) in enumerate(CATEGORIES):
        if any(lowered.startswith(beginning) for beginning in beginnings):
            return index
    return len(CATEGORIES) - 1


def parts(node: Breakdown) -> list[Breakdown]:
    """The summands of a node: of several phases the largest counts."""
    while node.combine == "max" and node.children:
        node = max(node.children, key=lambda child: child.value)
    return list(node.children) if node.combine == "sum" else [node]


def by_category(stage: Breakdown) -> list[float]:
    """Bytes of each category of one stage."""
    sizes = [0.0] * len(CATEGORIES)
    for part in parts(stage):
        sizes[category(part.name)] += part.value
    return sizes


def memory_lines(estimate: Estimate) -> list[Text]:
    """One bar a pipeline stage, scaled to the memory limit, equal neighbours merged, and a legend."""
    tree = estimate.memory
    stages = list(tree.children) if tree.combine == "max" and tree.children else [tree]
    rows = _merged([(stage.name, by_category(stage), stage.value) for stage in stages])
    scale = max(estimate.memory_limit_bytes, *(total for _, _, total in rows))
    label_width = max(len(label) for label, _, _ in rows)
    lines = [_memory_line(label.ljust(label_width), sizes, total, scale) for label, sizes, total in rows]
    used = [i for i in range(len(CATEGORIES)) if any(sizes[i] > 0 for _, sizes, _ in rows)]
    legend = Text("  ")
    for index in used:
        letter, name, colour, _ = CATEGORIES[index]
        legend.append(f"{letter} {name}  ", style=colour)
    worst = max(rows, key=lambda row: row[2])[1]
    detail = ", ".join(f"{CATEGORIES[i][1]} {worst[i] / GIB:.1f}" for i in used)
    return [*lines, legend, Text(f"  worst stage, GiB: {detail}")]


def _memory_line(label: str, sizes: list[float], total: float, scale: float) -> Text:
    line = Text(f"  {label}  [")
    drawn, reached = 0, 0.0
    for (letter, _, colour, _), size in zip(CATEGORIES, sizes, strict=True):
        reached += size
        upto = min(round(WIDTH * reached / scale), WIDTH)
        line.append(letter * (upto - drawn), style=colour)
        drawn = upto
    line.append("." * (WIDTH - drawn), style="dim")
    return line.append(f"] {gib(total):>10}")


def _merged(rows: list[tuple[str, list[float], float]]) -> list[tuple[str, list[float], float]]:
    """Neighbouring stages that look alike become one row; of very many different ones the first, the worst and the last stay."""
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


def time_lines(estimate: Estimate) -> list[Text]:
    """One bar a part of the step; what is below 0.1 % is left out."""
    total = estimate.time.value
    rows = [(part.name, part.value) for part in parts(estimate.time) if part.value >= 0.001 * total]
    if not rows:
        return []
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        bar = "#" * round(WIDTH * value / total)
        line = Text(f"  {name.ljust(width)}  [").append(bar, style="cyan").append("." * (WIDTH - len(bar)), style="dim")
        lines.append(line.append(f"] {duration(value):>8} {percent(value / total):>7}"))
    return lines


def bound_by(estimate: Estimate) -> str:
    """The largest part of the step besides plain computation, or computation itself when nothing else reaches a tenth."""
    rows = sorted(parts(estimate.time), key=lambda part: -part.value)
    return rows[0].name if rows else ""
