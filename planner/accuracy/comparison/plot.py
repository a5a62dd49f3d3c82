"""Scatter plots of predicted against measured, coloured by group, on logarithmic axes with bands of 10 and 25 %.

Needs matplotlib (the extra ``plot``); the same rows give the same SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from planner.accuracy.comparison.classes import class_of_run
from planner.accuracy.comparison.report import Scored
from planner.errors import MissingExtraError
from planner.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Format = Literal["svg", "png"]
Point = tuple[str, float, float]
"""Group, measured, predicted."""
BANDS = ((0.25, "0.92"), (0.10, "0.82"))
"""Relative error of a band and its grey."""
_STYLE: dict[Any, Any] = {"svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9.0}
_NO_DATE: dict[Format, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}


def check_available() -> None:
    """Refuse early where matplotlib is not installed, or not so that it can be imported."""
    try:
        for name in ("matplotlib", "matplotlib.figure"):
            import_module(name)
    except ImportError as problem:
        raise MissingExtraError(
            f"plots need matplotlib: {problem}"[:200],
            where="--plot",
            got="no matplotlib that can be imported",
            allowed="matplotlib of the extra `plot`",
            hint="pip install 'parallel-planner[plot]'",
        ) from problem


def time_points(rows: Sequence[Scored]) -> list[Point]:
    """Step times in seconds."""
    return [
        (class_of_run(row.run), row.run.measured.step_time_s, row.prediction.step_time_s)
        for row in rows
        if row.time_error is not None
        and row.run.measured.step_time_s is not None
        and row.prediction.step_time_s is not None
    ]


def memory_points(rows: Sequence[Scored]) -> list[Point]:
    """Peak memory in GiB."""
    return [
        (class_of_run(row.run), row.run.measured.peak_mem_gib, row.prediction.peak_memory_bytes / GIB)
        for row in rows
        if row.run.measured.peak_mem_gib is not None and row.prediction.peak_memory_bytes is not None
    ]


PANELS: dict[str, tuple[str, Callable[[Sequence[Scored]], list[Point]]]] = {
    "step time": ("s", time_points),
    "peak memory": ("GiB", memory_points),
}


def scatter(rows: Sequence[Scored], panels: Sequence[str], kind: Format) -> bytes:
    """One panel a quantity, side by side; a panel without rows says so."""
    check_available()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.5 * len(panels), 6.5), layout="constrained")
        for index, name in enumerate(panels):
            unit, points_of = PANELS[name]
            _panel(figure.add_subplot(1, len(panels), index + 1), name, unit, points_of(rows))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=_NO_DATE[kind], dpi=150)
    return buffer.getvalue()


def _panel(axes: Axes, name: str, unit: str, points: Sequence[Point]) -> None:
    axes.set_title(f"Predicted against measured {name}, {len(points):,} runs")
    axes.set_xlabel(f"measured {name}, {unit}")
    axes.set_ylabel(f"predicted {name}, {unit}")
    if not points:
        axes.text(0.5, 0.5, "no runs with this figure", ha="center", transform=axes.transAxes)
        return
    values = [value for _, *pair in points for value in pair]
    low, high = min(values) / 1.3, max(values) * 1.3
    for error, grey in BANDS:
        ends = [low, high]
        axes.fill_between(
            ends, [x * (1 - error) for x in ends], [x * (1 + error) for x in ends], color=grey, lw=0, zorder=0
        )
    axes.plot([low, high], [low, high], color="0.4", lw=0.8, zorder=1)
    groups = sorted({group for group, _, _ in points})
    for index, group in enumerate(groups):
        own = [(measured, predicted) for owner, measured, predicted in points if owner == group]
        x, y = zip(*own, strict=True)
        marker = "osD^v"[index // 10 % 5]
        axes.scatter(x, y, s=7, marker=marker, color=f"C{index % 10}", lw=0, alpha=0.7, label=f"{group} ({len(own)})")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.legend(loc="upper left", fontsize=7.5, markerscale=2.0, title="bands: 10 % and 25 %", title_fontsize=7.5)
