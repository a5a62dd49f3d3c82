"""The constraint model of one candidate: builds it, runs CP-SAT, and turns the solution back into a layout.

The only place that runs the solver; importing it loads ortools, so the engine imports it when there is something to
solve.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from threading import Thread
from typing import Any, Literal

import numpy as np
from ortools.sat.python import cp_model

from planner.search.bounds import Needs
from planner.search.constraints import add_constraints
from planner.search.inner import Inner
from planner.search.objective import below, constant_s, peak_memory, step_time, units_for
from planner.search.variables import EdgeForm, Expr, RunForm, Variables, add_hint, leading_run, make_variables
from planner.specs.batch import IntArray

MOST_WORK = 30.0
"""Work after which a candidate is left unproven, in the solver's deterministic seconds (about as many real ones)."""

_POLL_S = 0.05

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
    """The best decision of the single candidate in ``inner``, if it is faster than ``cutoff_s``; exact up to
    rounding."""
    floor_s, floor = float("-inf"), None
    if leading_run(inner) is None and not minimise_memory:
        relaxed = _Model(inner, needs, cutoff_s, time_limit_s, relaxed=True)
        status = relaxed.minimise_time()
        if status != "optimal":
            return Solution(status)
        floor_s, floor = relaxed.bound_s(), relaxed.bound()
    exact = _Model(inner, needs, cutoff_s, time_limit_s, relaxed=False)
    exact.start_from(hint, floor)
    if minimise_memory and (status := exact.minimise_memory()) != "optimal":
        return exact.solution(status, float("-inf"))
    status = exact.minimise_time()
    return exact.solution(status, max(floor_s, exact.bound_s()) if status in ("optimal", "feasible") else floor_s)


class _Model:
    """One constraint model with its solver."""

    def __init__(
        self, inner: Inner, needs: Needs, cutoff_s: float, time_limit_s: float | None, *, relaxed: bool
    ) -> None:
        self.inner, self.units, self.model = inner, units_for(inner), cp_model.CpModel()
        self.variables = make_variables(self.model, inner, needs, relaxed=relaxed)
        self.peaks = add_constraints(self.model, self.variables, inner, self.units)
        self.time = step_time(self.variables, inner, self.units)
        self.solver = _solver(time_limit_s)
        if np.isfinite(cutoff_s):
            below(self.model, self.time, inner, self.units, cutoff_s)

    def start_from(self, hint: Hint | None, floor: int | None) -> None:
        """Give the solver a known decision, and the optimum of the relaxation (in the same objective units)."""
        if hint is not None:
            add_hint(self.model, self.variables, self.inner, hint.layout, hint.recomputed, hint.step)
        if floor is not None:
            self.model.add(self.time >= floor)

    def minimise_memory(self) -> SolveStatus:
        """Find the least peak memory and hold it from then on."""
        peak = peak_memory(self.model, self.peaks)
        self.model.minimize(peak)
        status = _status(self.solver, _run(self.solver, self.model))
        if status == "optimal":
            self.model.add(peak <= self.solver.value(peak))
        return status

    def minimise_time(self) -> SolveStatus:
        self.model.minimize(self.time)
        return _status(self.solver, _run(self.solver, self.model))

    def bound(self) -> int:
        """What ``bound_s`` says, in objective units."""
        return int(self.solver.best_objective_bound)

    def bound_s(self) -> float:
        """Step time that no decision beats, after ``minimise_time``."""
        return self.solver.best_objective_bound * self.units.objective_s + constant_s(self.inner)

    def solution(self, status: SolveStatus, bound_s: float) -> Solution:
        if status in ("infeasible", "unknown"):
            return Solution(status, bound_s=bound_s)
        most, step = _value(self.solver, self.variables.most), _value(self.solver, self.variables.step)
        return Solution(status, _layout(self.solver, self.variables, self.inner), most, step, bound_s)


def _run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """Solve in a thread, so that Ctrl-C reaches this one while the solver's native code runs."""
    status: list[Any] = []
    thread = Thread(target=lambda: status.append(solver.solve(model)), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
    except KeyboardInterrupt:
        solver.stop_search()
        thread.join()
        raise
    return status[0]


def _solver(time_limit_s: float | None) -> cp_model.CpSolver:
    """One worker and a fixed seed: the same model always gives the same solution."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # Raise the bound first: the default closes the gap unit by unit on coefficients this large.
    solver.parameters.use_objective_lb_search = True
    # Off because presolve of ortools 9.15 loses optimal solutions of these models (tests/property/test_bound.py finds
    # it at once), as its lb-tree search ends in wrong solutions and an abort.  The models are small.
    solver.parameters.cp_model_presolve = False
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_deterministic_time = MOST_WORK
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


def _value(solver: cp_model.CpSolver, variable: Expr) -> int:
    return variable if isinstance(variable, int) else int(solver.value(variable))


def _layout(solver: cp_model.CpSolver, variables: Variables, inner: Inner) -> IntArray:
    """(S,) layers of the virtual stages."""
    form = variables.form
    if isinstance(form, EdgeForm):
        edges = [_value(solver, edge) for edge in form.edges]
        return np.array([after - before for before, after in pairwise(edges)], dtype=np.int64)
    if not isinstance(form, RunForm):
        raise RuntimeError("a relaxation has no layout")
    layout = np.zeros(inner.stages, dtype=np.int64)
    for stage, head in enumerate(form.heads):
        layout[stage] = _value(solver, head.lead) + _value(solver, head.main)
    for rank, share in enumerate(form.shares):
        if share.stages:
            mine = [s for s in range(rank, inner.stages, inner.group.pp) if s >= len(form.heads)]
            base, more = divmod(_value(solver, share.layers), share.stages)
            layout[mine] = [base + (chunk < more) for chunk in range(share.stages)]
    return layout
