"""Fits constants of the cost model to measured step times: robust least squares on the logarithm of the error.

Every free constant has a log-normal prior from its evidence, so that runs which say nothing about it leave it alone;
outliers count linearly (soft L1), because published tables hold mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.accuracy.predict import predict
from planner.accuracy.runs.interpret import Case
from planner.cost.constants import ConstantTable, Fitted, Key
from planner.specs.batch import FloatArray

_SOFT_ERROR = 0.05
"""Log error at which a row starts to count linearly."""
_STEP = 1e-3
"""Relative step of the numerical derivative."""
_ITERATIONS = 12
_REFIT_ITERATIONS = 4
_BOUNDED = 1.0
"""Largest move of the logarithm of a constant in one iteration."""


@dataclass(frozen=True)
class Fit:
    """Values found, and what the fit knows about them."""

    values: dict[Key, float]
    errors: FloatArray
    """log(predicted / measured) of every row at these values."""
    jacobian: FloatArray
    """Its derivative by the logarithm of every constant."""


@dataclass(frozen=True)
class Minimum:
    """Where a robust fit ended."""

    logs: FloatArray
    """(constants,) logarithms of the values."""
    errors: FloatArray
    """(rows,) at these values."""
    jacobian: FloatArray
    """(rows, constants) derivative of the errors by the logarithms."""
    determined: FloatArray
    """(constants,) share of what is known that comes from the rows: 0 the prior's alone, 1 the rows' alone."""


def log_errors(cases: Sequence[Case], table: ConstantTable) -> FloatArray:
    """log(predicted / measured) step time of cases that have both."""
    predictions = predict(cases, table)
    measured = np.array([case.run.measured.step_time_s for case in cases], dtype=float)
    errors: FloatArray = np.log(np.array([p.step_time_s for p in predictions], dtype=float) / measured)
    return errors


def fit(
    cases: Sequence[Case],
    table: ConstantTable,
    free: Mapping[Key, Fitted],
    weights: FloatArray,
    *,
    iterations: int = _ITERATIONS,
    progress: Callable[[int, float], None] | None = None,
) -> Fit:
    """Constants of the table that fit the step times best; ``weights`` (rows,) scale the squared errors."""
    keys = list(free)

    def at(logs: FloatArray) -> FloatArray:
        return log_errors(cases, table.with_values(dict(zip(keys, np.exp(logs), strict=True))))

    found = minimise(
        at,
        np.log([free[key].value for key in keys]),
        np.log([free[key].prior for key in keys]),
        np.array([free[key].spread for key in keys]),
        weights,
        iterations=iterations,
        progress=progress,
    )
    return Fit(dict(zip(keys, np.exp(found.logs).tolist(), strict=True)), found.errors, found.jacobian)


def minimise(
    errors_at: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    prior: FloatArray,
    spread: FloatArray,
    weights: FloatArray,
    *,
    iterations: int = _ITERATIONS,
    progress: Callable[[int, float], None] | None = None,
) -> Minimum:
    """Gauss-Newton with iteratively reweighted rows and a normal prior on every logarithm.

    ``errors_at`` maps (constants,) logarithms to (rows,) errors; start, prior and spread are (constants,)."""
    x, precision = np.array(start, dtype=float), 1.0 / spread**2

    def loss(errors: FloatArray, logs: FloatArray) -> float:
        soft = 2.0 * (np.sqrt(1.0 + (errors / _SOFT_ERROR) ** 2) - 1.0)
        return float(np.sum(weights * soft) + np.sum(precision * (logs - prior) ** 2))

    errors = errors_at(x)
    best, damping = loss(errors, x), 1e-3
    jacobian = np.zeros((len(errors), len(x)))
    data = np.zeros((len(x), len(x)))
    for iteration in range(iterations):
        for column in range(len(x)):
            moved = x.copy()
            moved[column] += _STEP
            jacobian[:, column] = (errors_at(moved) - errors) / _STEP
        robust = weights / _SOFT_ERROR**2 / np.sqrt(1.0 + (errors / _SOFT_ERROR) ** 2)
        data = jacobian.T @ (robust[:, None] * jacobian)
        hessian = data + np.diag(precision)
        gradient = jacobian.T @ (robust * errors) + precision * (x - prior)
        improved = False
        for _ in range(6):
            change = -np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            trial = x + np.clip(change, -_BOUNDED, _BOUNDED)
            trial_errors = errors_at(trial)
            trial_loss = loss(trial_errors, trial)
            if trial_loss < best:
                improved = best - trial_loss > 1e-4 * best
                x, errors, best, damping = trial, trial_errors, trial_loss, damping / 5.0
                break
            damping *= 5.0
        if progress is not None:
            progress(iteration, best)
        if not improved:
            break
    variance = np.diag(np.linalg.inv(data + np.diag(precision)))
    return Minimum(x, errors, jacobian, np.clip(1.0 - variance * precision, 0.0, 1.0))


def refit(fit: Fit, free: Mapping[Key, Fitted], weights: FloatArray) -> FloatArray:
    """Change of the logarithms of the constants when rows have other weights (0 leaves a row out).

    The errors are taken as linear around the fit; the rows' robust weights follow the change."""
    keys = list(fit.values)
    at = np.log([fit.values[key] for key in keys])
    prior = np.log([free[key].prior for key in keys])
    precision = 1.0 / np.array([free[key].spread for key in keys]) ** 2
    change = np.zeros(len(keys))
    for _ in range(_REFIT_ITERATIONS):
        errors = fit.errors + fit.jacobian @ change
        robust = weights / _SOFT_ERROR**2 / np.sqrt(1.0 + (errors / _SOFT_ERROR) ** 2)
        hessian = fit.jacobian.T @ (robust[:, None] * fit.jacobian) + np.diag(precision)
        gradient = fit.jacobian.T @ (robust * errors) + precision * (at + change - prior)
        change = change - np.linalg.solve(hessian, gradient)
    return np.asarray(change)
