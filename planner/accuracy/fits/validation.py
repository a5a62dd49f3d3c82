"""How large the error is on runs that the constants were not fitted to: cross-validation over groups of runs and over
whole sources.

A group is one source's runs of one model on one accelerator.  Without a group the constants move little, so its errors
follow from the fit's derivative; without a source they may move far, so its runs are priced again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.accuracy.fits.fitting import Fit, log_errors, refit
from planner.accuracy.runs.interpret import Case
from planner.cost.constants import ConstantTable, Fitted, Key
from planner.specs.batch import FloatArray


@dataclass(frozen=True)
class CrossValidation:
    """log(predicted / measured) of every row by constants fitted without it."""

    without_group: FloatArray
    without_source: FloatArray
    without_accelerator: FloatArray
    without_framework: FloatArray


def group_of(case: Case) -> tuple[str, ...]:
    """What is left out together: source, model, accelerator."""
    return (case.run.source_name, case.run.model.name, case.context.cluster.accelerator.id)


def cross_validate(
    cases: Sequence[Case],
    table: ConstantTable,
    free: Mapping[Key, Fitted],
    weights: FloatArray,
    fit: Fit,
    progress: Callable[[str], None] | None = None,
) -> CrossValidation:
    """Out-of-fold errors of ``cases``, which ``fit`` was fitted to with ``weights``."""
    without_group = np.array(fit.errors)
    for rows in folds([group_of(case) for case in cases]):
        change = refit(fit, free, np.where(rows, 0.0, weights))
        without_group[rows] = fit.errors[rows] + fit.jacobian[rows] @ change

    def priced_again(names: Sequence[tuple[str, ...]]) -> FloatArray:
        errors = np.array(fit.errors)
        for rows in folds(names):
            change = refit(fit, free, np.where(rows, 0.0, weights))
            values = {
                key: value * float(np.exp(step)) for (key, value), step in zip(fit.values.items(), change, strict=True)
            }
            left_out = [case for case, chosen in zip(cases, rows, strict=True) if chosen]
            errors[rows] = log_errors(left_out, table.with_values(values))
            if progress is not None:
                progress(names[int(np.argmax(rows))][0])
        return errors

    return CrossValidation(
        without_group,
        priced_again([(case.run.source_name,) for case in cases]),
        priced_again([(case.context.cluster.accelerator.id,) for case in cases]),
        priced_again([(case.context.backend.family,) for case in cases]),
    )


def folds(names: Sequence[tuple[str, ...]]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """One mask for each distinct name."""
    index = {name: place for place, name in enumerate(dict.fromkeys(names))}
    codes = np.array([index[name] for name in names])
    return [codes == code for code in range(len(index))]
