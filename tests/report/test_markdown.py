"""The Markdown report: the same numbers as the pictures, whole tables, and no markup from names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.report.figures import pictures
from planner.report.markdown import BAR, bar, escaped, markdown_report
from planner.units import duration, gib
from tests.report.documents import CASES, HOSTILE, hostile, piped, searched

EXPECTED = Path(__file__).parent / "expected"
GOLDEN = {"searched": searched, "piped": piped}


def timeless(text: str) -> str:
    """Without the search's own seconds."""
    return re.sub(r"solved exactly, [0-9.]+ \w+;", "solved exactly, 1 s;", text)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    """The whole text; --update-golden accepts a change."""
    text, file = timeless(markdown_report(GOLDEN[name]())), EXPECTED / f"{name}.md"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "pytest --update-golden accepts the new text"


@pytest.mark.parametrize("name", CASES)
def test_tables_are_whole(name: str) -> None:
    """Every row of a table has as many cells as its head, and tables stand apart from text."""
    lines = markdown_report(CASES[name]()).splitlines()
    cells = 0
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("|"):
            cells = 0
            continue
        found = len(re.findall(r"(?<!\\)\|", line))
        assert before == "" or found == cells, line
        cells = found
    assert sum(line.startswith("### ") for line in lines) >= 2


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_pictures(name: str) -> None:
    """Stages, parts of the step, traffic and plans with the digits that units.py gives them."""
    text, drawn = markdown_report(CASES[name]()), pictures(CASES[name]())
    for row in drawn.stages:
        assert gib(row.total_bytes) in text
    for part in drawn.time:
        assert re.search(rf"\| {re.escape(part.name)} \|.*\| {re.escape(duration(part.seconds))} \|", text)
    for item in drawn.topology.traffic:
        assert gib(item.sent_bytes_per_gpu) in text
    for point in drawn.points:
        assert duration(point.step_time_s) in text


def test_bars() -> None:
    """Full at a share of 1, never longer, and beyond it an arrow says so."""
    assert bar(0.5).count("█") == BAR // 2
    assert len(bar(0.0)) == len(bar(1.0)) == BAR
    assert bar(1.2) == "█" * BAR + "→"
    assert bar(-0.1) == bar(0.0)


def test_markup_in_names_is_text() -> None:
    """Nothing of a hostile name is read: no tag, no cell, no link, no mention, no reference."""
    text = markdown_report(hostile())
    assert re.findall(r"(?<!\\)<(?!/?(?:details|summary)>)", text) == []
    assert re.findall(r"(?<!\\)\]\(", text) == []
    assert "@team" not in text
    assert not re.search(r"#\d", text)
    assert "http://evil" not in text
    assert "\u2028" not in text


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("1. first", "1\\. first"),
        ("- item", "\\- item"),
        ("29.3 s", "29.3 s"),
        ("gpus_per_node = 8", "gpus_per_node = 8"),
        ("_under_", "\\_under\\_"),
        ("two\nlines", "two lines"),
        ("a|b", "a\\|b"),
        ("===", "\\==="),
    ],
)
def test_escaping(plain: str, shown: str) -> None:
    """Only what Markdown would read is escaped."""
    assert escaped(plain) == shown


def test_the_hostile_name_is_all_there() -> None:
    """Escapes taken away again, the name is what it was."""
    text = re.sub(r"\\(.)", r"\1", escaped(HOSTILE)).replace("\N{ZERO WIDTH SPACE}", "")
    assert text == " ".join(HOSTILE.split())
