"""The published error of each class as a committed table, and which classes have become worse than it allows.

``make accuracy`` rewrites the table (data/baseline.json); a test compares every change with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.accuracy.runs.records import DATA
from planner.specs.accuracy import AccuracyDocument, Errors

FILE = DATA / "baseline.json"
SLACK = {"median": 0.005, "p90": 0.02, "skipped": 0.0, "false_fits": 0.005, "false_misfits": 0.01, "regret": 0.01}
"""How much worse a figure may get before the comparison fails, absolute."""
_SMALL_CLASS = 20
_SMALL_CLASS_SLACK = 2.0
"""Classes with few rows move more; their slack is larger by this factor."""


def table_of(document: AccuracyDocument) -> dict[str, Any]:
    """The figures that are held: by class, step time and memory; fit; ranking."""
    step_time = {
        row.group: {**_figures(row.errors), "skipped": row.skipped} for row in document.step_time if row.errors
    }
    memory = {f"{row.group}: {row.kind}": _figures(row.errors) for row in document.memory}
    fit = {
        row.group: {"false_fits": row.false_fits, "false_misfits": row.false_misfits}
        for row in document.fit
        if row.false_fits is not None and row.false_misfits is not None
    }
    ranking = None if document.ranking is None else {"regret": document.ranking.regret_mean}
    return {"slack": SLACK, "step_time": step_time, "memory": memory, "fit": fit, "ranking": {"grids": ranking}}


def _figures(errors: Errors) -> dict[str, float]:
    return {"rows": errors.rows, "median": errors.median, "p90": errors.p90}


def read(path: Path = FILE) -> dict[str, Any]:
    """The committed table."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def text_of(table: Mapping[str, Any]) -> str:
    """The table as the file holds it."""
    return json.dumps(table, indent=1) + "\n"


def worse(committed: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One sentence for each figure that got worse by more than its slack, or is gone."""
    found = []
    for part in ("step_time", "memory", "fit", "ranking"):
        for group, figures in committed[part].items():
            current = now[part].get(group)
            if figures is None:
                continue
            if current is None:
                found.append(f"{part} of {group}: no longer there")
                continue
            found += [
                f"{part} of {group}: {name} {current[name]:.4f} instead of {value:.4f}"
                for name, value in figures.items()
                if name in SLACK and current[name] > value + _slack(committed["slack"], name, figures)
            ]
    return found


def _slack(slack: Mapping[str, float], name: str, figures: Mapping[str, float]) -> float:
    small = figures.get("rows", _SMALL_CLASS) < _SMALL_CLASS
    return slack[name] * (_SMALL_CLASS_SLACK if small else 1.0)
