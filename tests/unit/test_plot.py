"""Scatter plots: the same rows give the same bytes, and a missing matplotlib is a missing extra."""

from __future__ import annotations

import sys

import pytest

from planner.accuracy.comparison import plot
from planner.accuracy.comparison.report import Scored, paired
from planner.accuracy.predict import Prediction
from planner.errors import MissingExtraError
from planner.units import GIB
from tests.accuracy_records import measured_run

PANELS = list(plot.PANELS)


def rows() -> list[Scored]:
    runs = [measured_run(f"lab/{i}", measured__step_time_s=1.0 + i, measured__peak_mem_gib=20.0 + i) for i in range(5)]
    return paired(runs, [Prediction(run.id, 1.1, 21.0 * GIB, True) for run in runs], [])


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_same_rows_same_bytes(kind: plot.Format) -> None:
    """No date and no random ids."""
    image = plot.scatter(rows(), PANELS, kind)
    assert image == plot.scatter(rows(), PANELS, kind)
    assert image.startswith(b"<?xml" if kind == "svg" else b"\x89PNG")
    assert b"<dc:date>" not in image


def test_text_of_the_plot() -> None:
    """Classes with their counts, axes with units, bands."""
    image = plot.scatter(rows(), PANELS, "svg").decode()
    for text in ("megatron dense 16-bit (5)", "measured step time, s", "predicted peak memory, GiB", "10 % and 25 %"):
        assert text in image


def test_no_rows() -> None:
    """A quantity that nobody measured gives an empty panel."""
    assert "no runs with this figure" in plot.scatter([], PANELS, "svg").decode()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra and is raised before anything is predicted."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError) as problem:
        plot.check_available()
    assert problem.value.exit_code == 6
    assert "parallel-planner[plot]" in (problem.value.hint or "")
