"""Tables and figures as text, before any markup: HTML and Markdown lay out these same records.

Every figure carries its caption and the table that says the same without eyes or scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.service.ranking import Column


@dataclass(frozen=True)
class Table:
    """A titled table of text cells, row by row."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Mark:
    """One entry of a legend: the style class that script and style sheet give the mark, and what it means."""

    style: str
    label: str
    letter: str = ""
    """Stands in the mark where its name has no room."""


@dataclass(frozen=True)
class Figure:
    """A picture that the script draws under ``key``, with what it says in words and as a table."""

    key: str
    title: str
    caption: str
    table: Table
    legend: tuple[Mark, ...] = ()
    text_caption: str = ""
    """The caption where nothing is drawn; empty: the same."""


def table(title: str, columns: str, rows: Sequence[tuple[str, ...]]) -> Table:
    """``columns`` by commas; those that start with ``>`` hold numbers and are aligned right."""
    heads = [
        Column(name.removeprefix(">"), "right" if name.startswith(">") else "left") for name in columns.split(", ")
    ]
    return Table(title, tuple(heads), tuple(rows))
