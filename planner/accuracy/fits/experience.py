"""Turns errors on public runs into the ranges that every estimate carries (planner/cost/uncertainty.yaml).

A class needs runs of several groups to count as measured; what has fewer takes the error of runs that were left out
together with everything like them.  Coverage says how many runs a range holds that their own group did not make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.accuracy.fits.validation import folds, group_of
from planner.accuracy.predict import Prediction
from planner.accuracy.runs.interpret import Case
from planner.specs.batch import BoolArray, FloatArray

LEAST_RUNS, LEAST_GROUPS = 8, 2
"""Runs and groups (source, model, accelerator) that a class needs."""
LEAST_OUTCOMES = 30
"""Runs that ended out of memory from which on they say how far a class's memory may be above its estimate."""
HIGH = 0.9
"""Upper quantile of measured over predicted, with its mirror an 80 % range of the runs themselves."""
COVERED = 0.8
"""Share of the runs of left-out groups that a range must hold."""
FALSE_FIT = 0.015
"""Share of the runs out of memory that the upper end may let through."""


@dataclass(frozen=True)
class Errors:
    """log(predicted / measured) of cases, by degrees of strangeness."""

    cases: Sequence[Case]
    classes: Sequence[str]
    in_class: FloatArray
    """Without the case's own group."""
    left_out: FloatArray
    """Without all runs of the case's framework."""

    @property
    def stated(self) -> BoolArray:
        """Cases whose settings are all in the record."""
        return np.array([not case.assumed for case in self.cases], dtype=bool)


def widening(errors: FloatArray, without_accelerator: FloatArray, cases: Sequence[Case]) -> float:
    """How much wider (in logarithms) errors lie on accelerators whose runs the fit did not see; at least 1."""
    (low, high), (wide_low, wide_high) = _ends(errors, cases), _ends(without_accelerator, cases)
    return round(max(1.0, float(np.log(wide_high / wide_low) / np.log(high / low))), 2)


def ranges(errors: Errors, accelerator_widening: float) -> dict[str, Any]:
    """The document part for one quantity: classes, and the wider ranges outside them."""
    classes = {}
    for name in sorted(set(errors.classes)):
        rows = _rows_of(errors, name)
        mine = [case for case, chosen in zip(errors.cases, rows, strict=True) if chosen]
        if len(mine) < LEAST_RUNS or len({group_of(case) for case in mine}) < LEAST_GROUPS:
            continue
        level = _level(errors.in_class[rows], mine)
        classes[name] = {
            "range": _rounded(_ends(errors.in_class[rows], mine, level)),
            "from": "figures",
            "runs": len(mine),
            "coverage": round(_coverage(errors.in_class[rows], mine, level), 3),
            "accelerators": sorted({case.context.cluster.accelerator.id for case in mine}),
        }
    assumed = ~errors.stated
    others = [case for case, chosen in zip(errors.cases, assumed, strict=True) if chosen]
    return {
        "classes": classes,
        "outside": {
            "class": _rounded(_ends(errors.left_out, errors.cases)),
            "accelerator_widening": accelerator_widening,
            "assumed": _rounded(_ends(errors.in_class[assumed], others)) if others else [1.0, 1.0],
        },
    }


def _rows_of(errors: Errors, name: str) -> BoolArray:
    """Runs of a class, those with every setting stated if they are enough."""
    mine = np.array([other == name for other in errors.classes], dtype=bool)
    stated: BoolArray = mine & errors.stated
    return stated if stated.sum() >= LEAST_RUNS else mine


def _level(errors: FloatArray, cases: Sequence[Case]) -> float:
    """The least upper quantile, from 0.9 on, whose range holds 80 % of the runs of groups that did not make it; the one
    that holds most where none does."""
    levels = [HIGH, *np.arange(HIGH + 0.01, 1.0, 0.01)]
    held = [_coverage(errors, cases, level) for level in levels]
    enough = [level for level, share in zip(levels, held, strict=True) if share >= COVERED]
    return float(enough[0] if enough else levels[int(np.argmax(held))])


def _ends(errors: FloatArray, cases: Sequence[Case], level: float = HIGH) -> tuple[float, float]:
    """Factors on an estimate between which measured values lie; a group of n runs counts as sqrt(n), so that one large
    sweep does not decide."""
    names = [group_of(case) for case in cases]
    sizes = Counter(names)
    weights = np.array([sizes[name] ** -0.5 for name in names])
    order = np.argsort(-errors)
    share = np.cumsum(weights[order]) / weights.sum()
    ratio = np.exp(-errors[order])
    low, high = (float(ratio[min(int(np.searchsorted(share, end)), len(ratio) - 1)]) for end in (1.0 - level, level))
    return min(low, 1.0), max(high, 1.0)


def _rounded(ends: tuple[float, float]) -> list[float]:
    return [round(end, 3) for end in ends]


def _coverage(errors: FloatArray, cases: Sequence[Case], level: float) -> float:
    """Share of runs inside the range that the other groups of their class give."""
    inside = np.zeros(len(errors), dtype=bool)
    for rows in folds([group_of(case) for case in cases]):
        others = [case for case, left_out in zip(cases, rows, strict=True) if not left_out]
        low, high = _ends(errors[~rows], others, level)
        ratio = np.exp(-errors[rows])
        inside[rows] = (ratio >= low) & (ratio <= high)
    return float(inside.mean())


def boundary_ranges(
    cases: Sequence[Case], classes: Sequence[str], predictions: Sequence[Prediction]
) -> dict[str, dict[str, Any]]:
    """Memory ranges of classes that print no memory but whose runs did or did not fit: an upper end that lets few of
    the runs through that ended out of memory, and a lower end as far below."""
    found = {}
    for name in sorted(set(classes)):
        mine = [
            (case, prediction)
            for case, other, prediction in zip(cases, classes, predictions, strict=True)
            if other == name and case.run.measured.oom is True and prediction.peak_device_bytes is not None
        ]
        if len(mine) < LEAST_OUTCOMES:
            continue
        filled = np.array(
            [(prediction.peak_device_bytes or 0.0) / case.context.memory_limit_bytes for case, prediction in mine]
        )
        upper = max(1.0, float(1.0 / np.quantile(filled, FALSE_FIT)))
        found[name] = {
            "range": _rounded((1.0 / upper, upper)),
            "from": "outcomes",
            "runs": len(mine),
            "accelerators": sorted({case.context.cluster.accelerator.id for case, _ in mine}),
        }
    return found
