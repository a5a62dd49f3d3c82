"""What the constraint model minimises: the step time, or the peak memory and then the step time.

Step time = m * T_max + beta * (sum T - T_max) + tail + constants.  Layers are all placed, so of sum T only the
recomputation varies; dividing by m - beta makes the slowest rank's coefficient exactly one and keeps every rounding at
one unit.
"""

from __future__ import annotations

from ortools.sat.python import cp_model

from planner.search.constraints import Units
from planner.search.inner import Inner
from planner.search.scaling import to_integer, to_integers, unit_for
from planner.search.variables import Expr, Variables

_NO_STEADY_STATE = 1e-9
"""With m - beta below this the slowest rank has no weight of its own."""


def units_for(inner: Inner) -> Units:
    """Units of one candidate, so that no expression exceeds about 2**30."""
    m = inner.model
    weight = _steady_weight(inner)
    slowest = float(
        ((m.layer_time_s[0] + m.recompute_time_s[0]) * inner.totals).sum() + m.first_time_s[0] + m.last_time_s[0]
    )
    work = float(
        ((m.layer_optimizer_time_s[0] + abs(m.layer_offload_time_s[0]) + m.layer_reduce_time_s[0]) * inner.totals).sum()
    )
    ends = float(
        m.first_optimizer_time_s[0] + m.last_optimizer_time_s[0] + abs(m.first_offload_time_s[0])
        + abs(m.last_offload_time_s[0]) + m.first_reduce_time_s[0] + m.last_reduce_time_s[0] + m.reduce_floor_s[0]
    )  # fmt: skip
    objective = unit_for(max(weight * slowest, slowest, work + ends))
    return Units(
        time_s=objective / weight if weight > 0 else objective,
        objective_s=objective,
        memory_bytes=unit_for(max(float(inner.budget_bytes[0]), 1.0)),
    )


def _steady_weight(inner: Inner) -> float:
    weight = float(inner.model.slowest_weight[0] - inner.model.others_weight[0])
    return weight if weight > _NO_STEADY_STATE else 0.0


def step_time(variables: Variables, inner: Inner, units: Units) -> Expr:
    """The part of the step time that varies, in objective units."""
    again = float(inner.model.others_weight[0]) * inner.model.recompute_time_s[0]
    total: Expr = variables.tail + (variables.slowest if _steady_weight(inner) > 0 else 0)
    for rank in variables.recomputed:
        total += sum(c * n for c, n in zip(to_integers(again, units.objective_s, "nearest"), rank, strict=True))
    return total


def constant_s(inner: Inner) -> float:
    """The part of the step time that no decision changes."""
    m = inner.model
    total = float((m.layer_time_s[0] * inner.totals).sum() + m.first_time_s[0] + m.last_time_s[0])
    return float(m.others_weight[0]) * total + float(m.p2p_time_s[0]) + float(m.constant_time_s[0])


def below(model: cp_model.CpModel, time: Expr, inner: Inner, units: Units, cutoff_s: float) -> None:
    """Ensures that only decisions faster than ``cutoff_s`` are looked for."""
    model.add(time <= to_integer(cutoff_s - constant_s(inner), units.objective_s, "down"))


def peak_memory(model: cp_model.CpModel, peaks: list[Expr]) -> Expr:
    """A variable that is at least every rank's memory in every phase, in memory units."""
    peak = model.new_int_var(-(2**45), 2**45, "peak")
    for value in peaks:
        model.add(peak >= value)
    return peak
