"""The README's table is the one that the code prints."""

from __future__ import annotations

from pathlib import Path

from planner.accuracy.comparison.document import MARKS, summary
from planner.accuracy.comparison.report import report, scored
from planner.accuracy.runs.records import PUBLIC, public_records

README = Path(__file__).resolve().parents[2] / "README.md"


def test_summary_in_the_readme() -> None:
    """`make accuracy` rewrites it."""
    records = public_records()
    document = report(scored(records.runs), records, name=PUBLIC)
    written = README.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    assert written == summary(document) + "\n"
