"""Turns out-of-fold errors of public runs into the ranges that every estimate carries (planner/cost/uncertainty.yaml).

A class needs runs of several groups to count as measured; what has fewer takes the error of runs that were left out
together with everything like them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.accuracy.interpret import Case
from planner.accuracy.validation import group_of
from planner.cost.uncertainty import class_name
from planner.specs.batch import FloatArray

LEAST_RUNS, LEAST_GROUPS = 8, 2
"""Runs and groups (source, model, accelerator) that a class needs."""
LOW, HIGH = 0.1, 0.9
"""Quantiles of measured over predicted: an 80 % range."""


@dataclass(frozen=True)
class Errors:
    """log(predicted / measured) of cases, by three degrees of strangeness."""

    cases: Sequence[Case]
    in_class: FloatArray
    """Without the case's own group."""
    left_out: FloatArray
    """Without the case's whole source (memory: the same as ``in_class``, nothing of it is fitted per class)."""


def class_of(case: Case) -> str:
    """The class whose range an estimate of the case takes."""
    return class_name(case.context.backend.family, case.context.job, case.context.model)


def ranges(errors: Errors) -> dict[str, Any]:
    """The document part for one quantity: classes, and the wider ranges outside them."""
    names = [class_of(case) for case in errors.cases]
    stated = np.array([not case.assumed for case in errors.cases])
    classes = {}
    for name in sorted(set(names)):
        mine = np.array([other == name for other in names])
        rows = mine & stated if (mine & stated).sum() >= LEAST_RUNS else mine
        groups = {group_of(case) for case, chosen in zip(errors.cases, rows, strict=True) if chosen}
        if rows.sum() < LEAST_RUNS or len(groups) < LEAST_GROUPS:
            continue
        chosen_cases = [case for case, chosen in zip(errors.cases, rows, strict=True) if chosen]
        classes[name] = {
            "range": _ends(errors.in_class[rows], chosen_cases),
            "runs": int(rows.sum()),
            "accelerators": sorted({case.context.cluster.accelerator.id for case in chosen_cases}),
        }
    assumed = [case for case, known in zip(errors.cases, stated, strict=True) if not known]
    return {
        "classes": classes,
        "outside": {
            "class": _ends(errors.left_out, errors.cases),
            "accelerator": _ends(errors.left_out, errors.cases),
            "assumed": _ends(errors.in_class[~stated], assumed) if assumed else [1.0, 1.0],
        },
    }


def _ends(errors: FloatArray, cases: Iterable[Case]) -> list[float]:
    """Factors on an estimate between which measured values lie; every group counts the same, so that one large sweep
    does not decide."""
    sizes: dict[tuple[str, ...], int] = defaultdict(int)
    names = [group_of(case) for case in cases]
    for name in names:
        sizes[name] += 1
    weights = np.array([1.0 / np.sqrt(sizes[name]) for name in names])
    order = np.argsort(-errors)
    share = np.cumsum(weights[order]) / weights.sum()
    ratio = np.exp(-errors[order])
    low, high = (float(ratio[min(int(np.searchsorted(share, level)), len(ratio) - 1)]) for level in (LOW, HIGH))
    return [round(min(low, 1.0), 3), round(max(high, 1.0), 3)]
