"""The published error does not get worse unnoticed: every class stays within the slack of the committed table."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from planner.accuracy.comparison import baseline
from planner.accuracy.comparison.report import report, scored
from planner.accuracy.runs.records import public_records


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """Today's figures over the public records."""
    records = public_records()
    return baseline.table_of(report(scored(records.runs), records, name="public"))


def test_no_class_is_worse_than_committed(now: dict[str, Any]) -> None:
    """Run `make accuracy` after a change that is meant to move figures, and show the table before and after."""
    assert baseline.worse(baseline.read(), now) == []


def test_what_counts_as_worse(now: dict[str, Any]) -> None:
    """A figure beyond its slack and a class that is gone are named; a better one and one within the slack are not."""
    assert baseline.worse(now, now) == []
    changed = copy.deepcopy(now)
    group = "megatron dense 16-bit"
    changed["step_time"][group]["median"] += 0.9 * baseline.SLACK["median"]
    changed["step_time"][group]["p90"] -= 0.1
    assert baseline.worse(now, changed) == []
    changed["step_time"][group]["median"] += 0.2 * baseline.SLACK["median"]
    del changed["fit"]["all"]
    first, second = baseline.worse(now, changed)
    assert first.startswith(f"step_time of {group}: median")
    assert second == "fit of all: no longer there"


def test_small_classes_have_more_slack(now: dict[str, Any]) -> None:
    """Figures of few rows move more."""
    name, figures = next((name, row) for name, row in now["step_time"].items() if row["rows"] < 20)
    changed = copy.deepcopy(now)
    changed["step_time"][name]["median"] = figures["median"] + 1.5 * baseline.SLACK["median"]
    assert baseline.worse(now, changed) == []


def test_table_is_written_as_it_is_read(now: dict[str, Any]) -> None:
    """The file is plain JSON with the slack in it."""
    committed = baseline.read()
    assert baseline.text_of(committed) == baseline.FILE.read_text(encoding="utf-8")
    assert committed["slack"] == baseline.SLACK
    assert set(committed["step_time"]) == set(now["step_time"])
