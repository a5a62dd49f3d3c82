"""A plan document as Markdown for a pull request: the words, tables and numbers of the HTML report, with bars of text.

Names come from users and files: whatever Markdown, GitHub or HTML would read as more than text is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planner.render.engine import fill
from planner.report.content import Content, content_of
from planner.report.figures import pictures
from planner.report.tables import Figure, Table
from planner.service.ranking import Column
from planner.specs.pictures import Pictures
from planner.specs.plan import PlanDocument

BAR = 20
"""Characters of a full bar."""
FOLDED = ("points", "schedule")
"""Figures whose table repeats or refines what stands above: behind a fold."""

_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~$&^]|(?<!\w)_|_(?!\w))")
_LIST = re.compile(r"^(?:([-+=])|(\d+)([.)]))(?=\s|$|[-=])")
"""What would begin a list or a heading."""
_JOINED = re.compile(r"(?<=[@#])(?=\w)|(?<=://)|(?<=\bwww\.)", re.IGNORECASE)
"""Where GitHub would make a mention, a reference or a link out of plain text."""
_NOTHING = "\N{ZERO WIDTH SPACE}"


@dataclass(frozen=True)
class _Block:
    """A figure laid out."""

    title: str
    caption: str
    summary: str
    table: str
    folded: bool


def markdown_report(document: PlanDocument, drawn: Pictures | None = None) -> str:
    """The report as one Markdown text."""
    drawn = pictures(document) if drawn is None else drawn
    content = content_of(document, drawn)
    context = {
        "headline": escaped(content.headline),
        "strategy": escaped(content.strategy),
        "answer": "Fits" if content.fits else f"Does not fit, {escaped(content.verdict)}",
        "memory": escaped(content.memory),
        "facts": _facts(content),
        "basis": escaped(content.basis),
        "warnings": _lines(content.warnings),
        "plans": "" if content.plans is None else markdown_table(content.plans),
        "plans_title": "" if content.plans is None else escaped(content.plans.title),
        "others": _lines(content.others),
        "why": _lines(content.why),
        "figures": [_block(figure, drawn) for figure in content.figures],
        "assumed": _lines(content.assumptions),
        "search": None if content.search is None else escaped(content.search),
        "version": escaped(content.version),
        "document_id": escaped(content.document_id[:12]),
    }
    return fill("report/report.md.j2", context).rstrip() + "\n"


def escaped(text: str) -> str:
    """``text`` as Markdown that shows just it, on one line."""
    plain = _SPECIAL.sub(r"\\\1", _JOINED.sub(_NOTHING, " ".join(text.split())))
    return _LIST.sub(lambda start: f"\\{start[1]}" if start[1] else f"{start[2]}\\{start[3]}", plain)


def _lines(lines: Sequence[str]) -> list[str]:
    return [escaped(line) for line in lines]


def _facts(content: Content) -> str:
    heads = tuple(Column(fact.label, "right") for fact in content.facts)
    values = tuple(fact.value for fact in content.facts)
    return markdown_table(Table("", heads, (values, tuple(fact.note for fact in content.facts))))


def markdown_table(table: Table) -> str:
    """A table of escaped cells."""
    lines = [
        [escaped(column.name) for column in table.columns],
        ["---:" if column.justify == "right" else "---" for column in table.columns],
        *([escaped(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(figure: Figure, drawn: Pictures) -> _Block:
    shares = _shares(figure.key, drawn)
    table = figure.table
    if shares:
        rows = tuple((row[0], bar(share), *row[1:]) for row, share in zip(table.rows, shares, strict=True))
        table = Table(table.title, (table.columns[0], Column("", "left"), *table.columns[1:]), rows)
    return _Block(
        title=figure.title,
        caption=escaped(figure.text_caption or figure.caption),
        summary=escaped(table.title),
        table=markdown_table(table),
        folded=figure.key in FOLDED,
    )


def _shares(key: str, drawn: Pictures) -> list[float]:
    """Length of the bar of every row, where rows have one."""
    if key == "stages":
        return [row.total_bytes / drawn.memory_limit_bytes for row in drawn.stages]
    if key == "time":
        total = sum(part.seconds for part in drawn.time)
        return [part.seconds / total for part in drawn.time]
    if key == "traffic":
        most = max(item.sent_bytes_per_gpu for item in drawn.topology.traffic)
        return [item.sent_bytes_per_gpu / most if most else 0.0 for item in drawn.topology.traffic]
    return []


def bar(share: float) -> str:
    """A bar that is full at a share of 1; longer than full is said by an arrow."""
    filled = round(BAR * min(max(share, 0.0), 1.0))
    return (
        "\N{FULL BLOCK}" * filled + "\N{LIGHT SHADE}" * (BAR - filled) + ("\N{RIGHTWARDS ARROW}" if share > 1 else "")
    )
