"""The constraint model of one candidate: builds it, runs CP-SAT, and turns the solution back into a layout.

The only place that runs the solver; importing it loads ortools, so the engine imports it when there is something to solve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from ortools.sat.python import cp_model

from planner.search.bounds import Needs
from planner.search.constraints import Units, add_constraints
from planner.search.inner import Inner
from planner.search.objective import below, constant_s, peak_memory, step_time, units_for
from planner.search.variables import EdgeForm, Expr, Variables, add_hint, make_variables
from planner.specs.batch import IntArray

SolveStatus = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class Solution:
    """Answer of the solver for one candidate."""

    status: SolveStatus
    layout: IntArray | None = None
    """(S,)"""
    recomputed: int = 0
    step: int = 0
    bound_s: float = float("-inf")
    """Step time that no decision of this candidate beats (within the rounding)."""


@dataclass(frozen=True)
class Hint:
    """A known decision."""

    layout: IntArray
    recomputed: int
    step: int


def solve(
    inner: Inner,
    needs: Needs,
    *,
    cutoff_s: float = float("inf"),
    hint: Hint | None = None,
    time_limit_s: float | None = None,
    minimise_memory: bool = False,
) -> Solution:
    """The best decision of the single candidate in ``inner``, if it is faster than ``cutoff_s``; exact up to rounding."""
    units = units_for(inner)
    model = cp_model.CpModel()
    variables = make_variables(model, inner, needs)
    peaks = add_constraints(model, variables, inner, units)
    time = step_time(variables, inner, units)
    if np.isfinite(cutoff_s):
        below(model, time, inner, units, cutoff_s)
    if hint is not None:
        add_hint(model, variables, inner, hint.layout, hint.recomputed, hint.step)
    solver = _solver(time_limit_s)
    if minimise_memory:
        peak = peak_memory(model, peaks)
        model.minimize(peak)
        status = _status(solver, solver.solve(model))
        if status != "optimal":
            return _solution(solver, status, variables, inner, units, bounded=False)
        model.add(peak <= solver.value(peak))
    model.minimize(time)
    return _solution(solver, _status(solver, solver.solve(model)), variables, inner, units, bounded=True)


def _solver(time_limit_s: float | None) -> cp_model.CpSolver:
    """One worker and a fixed seed: the same model always gives the same solution."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False
    if time_limit_s is not None:
        solver.parameters.max_time_in_seconds = max(time_limit_s, 0.001)
    return solver


def _status(solver: cp_model.CpSolver, status: Any) -> SolveStatus:
    match status:
        case cp_model.OPTIMAL:
            return "optimal"
        case cp_model.FEASIBLE:
            return "feasible"
        case cp_model.INFEASIBLE:
            return "infeasible"
        case cp_model.UNKNOWN:
            return "unknown"
        case _:
            raise RuntimeError(f"the constraint model is invalid: {solver.status_name(status)}")


def _solution(
    solver: cp_model.CpSolver, status: SolveStatus, variables: Variables, inner: Inner, units: Units, *, bounded: bool
) -> Solution:
    bound = float("-inf")
    if bounded and status in ("optimal", "feasible"):
        bound = solver.best_objective_bound * units.objective_s + constant_s(inner)
    if status in ("infeasible", "unknown"):
        return Solution(status, bound_s=bound)
    most, step = _value(solver, variables.most), _value(solver, variables.step)
    return Solution(status, _layout(solver, variables, inner, most), most, step, bound)


def _value(solver: cp_model.CpSolver, variable: Expr) -> int:
    return variable if isinstance(variable, int) else int(solver.value(variable))


def _layout(solver: cp_model.CpSolver, variables: Variables, inner: Inner, most: int) -> IntArray:
    """(S,) layers of the virtual stages."""
    form = variables.form
    if isinstance(form, EdgeForm):
        edges = [_value(solver, edge) for edge in form.edges]
        return np.array([after - before for before, after in zip(edges, edges[1:], strict=False)], dtype=np.int64)
    layout = np.zeros(inner.stages, dtype=np.int64)
    for stage, head in enumerate(form.heads):
        layout[stage] = _value(solver, head.lead) + _value(solver, head.main)
    for rank, share in enumerate(form.shares):
        if share.stages:
            held = _value(solver, share.layers)
            again = _value(solver, share.recomputed) if inner.group.counted[0] else held
            mine = [s for s in range(rank, inner.stages, inner.group.pp) if s >= len(form.heads)]
            layout[mine] = split_rank(held, again, most, share.stages)
    return layout


def split_rank(held: int, recomputed: int, most: int, chunks: int) -> list[int]:
    """Layers of a rank's chunks such that min(most, chunk) sums to ``recomputed``; at least one layer each.

    Example: 7 layers, 4 of them recomputed, at most 2 in each of 3 chunks: the surplus goes into one chunk, 5 + 1 + 1.
    """
    if recomputed == held:
        base, more = divmod(held, chunks)
        return [base + (chunk < more) for chunk in range(chunks)]
    others, count = recomputed - most, chunks - 1
    base, more = divmod(others, count) if count else (0, 0)
    return [held - others] + [base + (chunk < more) for chunk in range(count)]
