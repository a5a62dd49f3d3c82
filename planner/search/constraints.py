"""What every decision of a candidate must keep, one function a constraint.

Coefficients come from the stage model and become integers in scaling.py only; memory is rounded to the safe side, so
no solution can break the limit that is checked in floating point afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from planner.search.inner import Inner
from planner.search.scaling import to_integer, to_integers, unit_for
from planner.search.variables import TIME_LIMIT_UNITS, CountForm, EdgeForm, Expr, RunForm, Variables


@dataclass(frozen=True)
class Units:
    """Seconds of one time unit (slowest) and one objective unit, bytes of one memory unit."""

    time_s: float
    objective_s: float
    memory_bytes: float


def add_constraints(model: cp_model.CpModel, variables: Variables, inner: Inner, units: Units) -> list[Expr]:
    """All constraints; returns each rank's peak memory expressions in memory units (before the limit is applied)."""
    if isinstance(variables.form, RunForm):
        _all_layers_placed(model, variables.form, inner)
        _stages_in_model_order(model, variables.form, inner)
        if inner.group.counted[0]:
            _recomputation_realisable(model, variables.form, variables.most)
        _equal_ranks_ordered(model, variables.form, inner)
    elif len(inner.totals) > 1:
        _kinds_mixed_as_in_the_model(model, variables, inner)
        if isinstance(variables.form, CountForm):
            _counts_complete(model, variables, inner)
        else:
            _stages_filled(model, variables.form, inner)
    _slowest_rank(model, variables, inner, units)
    _longest_tail(model, variables, inner, units)
    peaks = _peaks(variables, inner, units)
    _memory_limit(model, peaks, inner, units)
    if inner.group.steps[0]:
        _host_limit(model, variables, inner)
    return peaks


def _all_layers_placed(model: cp_model.CpModel, form: RunForm, inner: Inner) -> None:
    """Ensures that the virtual stages together hold every layer of both runs once."""
    # Written for the two runs apart; stages that cannot hold the leading run carry the number 0 for it.
    main = sum(head.main for head in form.heads) + sum(share.layers for share in form.shares)
    model.add(main == int(inner.totals[-1]))
    if len(inner.totals) == 2:
        model.add(sum(head.lead for head in form.heads) == int(inner.totals[0]))


def _stages_in_model_order(model: cp_model.CpModel, form: RunForm, inner: Inner) -> None:
    """Ensures that every head stage holds a layer if it must, and that none of the main run precedes one of the leading
    run."""
    for head, least in zip(form.heads, inner.group.least_layers.tolist(), strict=False):
        model.add(head.lead + head.main >= least)
        model.add(head.lead + head.main <= inner.max_recomputed)
    leading = [head for head in form.heads if not isinstance(head.lead, int)]
    for index, (earlier, later) in enumerate(pairwise(leading)):
        goes_on = model.new_bool_var(f"leading run goes on after {index}")
        model.add(later.lead <= int(inner.totals[0]) * goes_on)
        model.add(earlier.main <= int(inner.totals[-1]) * (1 - goes_on))


def _recomputation_realisable(model: cp_model.CpModel, form: RunForm, most: Expr) -> None:
    """Ensures that a rank of one stage recomputes what the stage has, up to the number chosen."""
    for share in form.shares:
        if share.stages:
            model.add_min_equality(share.recomputed, [share.layers, most])


def _equal_ranks_ordered(model: cp_model.CpModel, form: RunForm, inner: Inner) -> None:
    """Ensures that of all equally good arrangements of equal ranks only the ascending one is searched.

    Later ranks hold no more micro-batches, so sorting loses nothing where the layers alone decide what is recomputed.
    """
    middle = range(max(len(form.heads), 1), inner.group.pp - 1)
    if not middle:
        return
    flight = inner.model.in_flight[0, middle.start : middle.stop]
    if (flight[:-1] >= flight[1:]).all():
        for rank in middle[:-1]:
            model.add(form.shares[rank].layers <= form.shares[rank + 1].layers)


def _kinds_mixed_as_in_the_model(model: cp_model.CpModel, variables: Variables, inner: Inner) -> None:
    """Ensures that a rank's mixture of kinds is one that contiguous stages can have.

    Over any n successive layers the count of a kind differs from its average share by a bounded amount; a rank of v
    stages differs by at most v times that.  Implied by contiguous stages, but it lets the solver reason about all
    ranks alike.
    """
    total = inner.layers
    for kind, count in enumerate(int(value) for value in inner.totals):
        drift = count * np.arange(total + 1) - total * inner.kind_prefix[:, kind]
        swing = int(drift.max() - drift.min()) * inner.group.vpp
        for parts in (variables.layers, variables.recomputed):
            for rank in parts:
                if not isinstance(rank[kind], int):
                    difference = count * sum(rank) - total * rank[kind]
                    model.add_linear_constraint(difference, -swing, swing)


def _stages_filled(model: cp_model.CpModel, form: EdgeForm, inner: Inner) -> None:
    """Ensures that every virtual stage holds as many layers as it must and no more than it may."""
    for (before, after), least in zip(pairwise(form.edges), inner.group.least_layers.tolist(), strict=True):
        model.add_linear_constraint(after - before, least, inner.max_recomputed)


def _counts_complete(model: cp_model.CpModel, variables: Variables, inner: Inner) -> None:
    """Ensures that all layers are placed, no stage is empty, and recomputation is what some split could have."""
    v, most, stages = inner.group.vpp, variables.most, inner.group.least_layers.reshape(-1, inner.group.pp).sum(axis=0)
    for kind, count in enumerate(inner.totals):
        model.add(sum(rank[kind] for rank in variables.layers) == int(count))
    for layers, recomputed, filled in zip(variables.layers, variables.recomputed, stages.tolist(), strict=True):
        model.add_linear_constraint(sum(layers), filled, v * inner.max_recomputed)
        if inner.group.counted[0]:
            fewest = model.new_int_var(0, 2**20, "")
            model.add_min_equality(fewest, [sum(layers), most + filled - 1])
            model.add(sum(recomputed) >= fewest)
            model.add(sum(recomputed) <= v * most)
            for again, held in zip(recomputed, layers, strict=True):
                model.add(again <= held)


def _slowest_rank(model: cp_model.CpModel, variables: Variables, inner: Inner, units: Units) -> None:
    """Ensures that ``slowest`` is at least every rank's time of one micro-batch, and that of the slowest rank of every
    chunk, all chunks together."""
    m, last, pp = inner.model, inner.group.pp - 1, inner.group.pp
    layer = to_integers(m.layer_time_s[0], units.time_s, "nearest")
    again = to_integers(m.recompute_time_s[0], units.time_s, "nearest")
    first_end = to_integer(float(m.first_time_s[0]), units.time_s, "nearest")
    last_end = to_integer(float(m.last_time_s[0]), units.time_s, "nearest")
    for rank, (counts, recomputed) in enumerate(zip(variables.layers, variables.recomputed, strict=True)):
        ends = (first_end if rank == 0 else 0) + (last_end if rank == last else 0)
        model.add(variables.slowest >= _dot(layer, counts) + _dot(again, recomputed) + ends)
    if variables.stages is None or inner.group.vpp == 1:
        return
    longest = [model.new_int_var(0, TIME_LIMIT_UNITS, f"longest[{chunk}]") for chunk in range(inner.group.vpp)]
    for stage, (counts, recomputed) in enumerate(zip(*variables.stages, strict=True)):
        ends = (first_end if stage == 0 else 0) + (last_end if stage == inner.stages - 1 else 0)
        model.add(longest[stage // pp] >= _dot(layer, counts) + _dot(again, recomputed) + ends)
    model.add(variables.slowest >= sum(longest))


def _longest_tail(model: cp_model.CpModel, variables: Variables, inner: Inner, units: Units) -> None:
    """Ensures that ``tail`` is at least every rank's optimizer step after its exposed traffic."""
    m, last, steps = inner.model, inner.group.pp - 1, max(int(inner.group.steps[0]), 1)
    share, unit = float(m.reduce_window_share[0]), units.objective_s
    work = to_integers(m.layer_optimizer_time_s[0], unit, "nearest")
    offload = to_integers(m.layer_offload_time_s[0] / steps, unit, "nearest")
    exposed = to_integers(m.layer_reduce_time_s[0] - share * m.layer_time_s[0], unit, "nearest")
    hidden = to_integers(share * m.recompute_time_s[0], unit, "nearest")
    floor = to_integer(float(m.reduce_floor_s[0]), unit, "nearest")
    for rank in range(inner.group.pp):
        at = [float(rank == 0), float(rank == last)]
        fixed = at[0] * m.first_optimizer_time_s[0] + at[1] * m.last_optimizer_time_s[0]
        each = at[0] * m.first_offload_time_s[0] + at[1] * m.last_offload_time_s[0]
        traffic = at[0] * (m.first_reduce_time_s[0] - share * m.first_time_s[0])
        traffic += at[1] * (m.last_reduce_time_s[0] - share * m.last_time_s[0])
        done = _dot(work, variables.layers[rank]) + _dot(offload, variables.offloaded[rank])
        done += to_integer(float(each / steps), unit, "nearest") * variables.step
        done += to_integer(float(fixed), unit, "nearest")
        rest = _dot(exposed, variables.layers[rank]) - _dot(hidden, variables.recomputed[rank])
        model.add(variables.tail >= done + floor)
        model.add(variables.tail >= done + rest + to_integer(float(traffic), unit, "nearest"))


def _peaks(variables: Variables, inner: Inner, units: Units) -> list[Expr]:
    """Upper bounds of each rank's memory in the forward/backward phase and in the optimizer step, in memory units."""
    m, last, steps, unit = inner.model, inner.group.pp - 1, max(int(inner.group.steps[0]), 1), units.memory_bytes
    peaks: list[Expr] = []
    removed = to_integers(m.layer_offloadable_bytes[0] / steps, unit, "down")
    temporary = to_integers(m.layer_state_bytes[0] + m.step_temporary_layer_bytes[0], unit, "up")
    for rank in range(inner.group.pp):
        at = [float(rank == 0), float(rank == last)]
        flight = float(m.in_flight[0, rank])
        kept = to_integers(m.layer_state_bytes[0] + flight * m.layer_activation_bytes[0], unit, "up")
        spared = to_integers(flight * m.recompute_saved_bytes[0], unit, "down")
        ends = at[0] * m.first_state_bytes[0] + at[1] * m.last_state_bytes[0]
        end_removed = (at[0] * m.first_offloadable_bytes[0] + at[1] * m.last_offloadable_bytes[0]) / steps
        moved = _dot(removed, variables.offloaded[rank]) + to_integer(float(end_removed), unit, "down") * variables.step
        running = m.fixed_bytes[0] + at[0] * flight * m.first_activation_bytes[0] + at[1] * m.last_fixed_bytes[0]
        forward = _dot(kept, variables.layers[rank]) - _dot(spared, variables.recomputed[rank])
        peaks.append(forward - moved + to_integer(float(ends + running), unit, "up"))
        peaks.append(_dot(temporary, variables.layers[rank]) - moved + to_integer(float(ends), unit, "up"))
    return peaks


def _memory_limit(model: cp_model.CpModel, peaks: list[Expr], inner: Inner, units: Units) -> None:
    """Ensures that no rank exceeds the GPU's memory in any phase."""
    limit = to_integer(float(inner.budget_bytes[0]), units.memory_bytes, "down")
    for peak in peaks:
        model.add(peak <= limit)


def _host_limit(model: cp_model.CpModel, variables: Variables, inner: Inner) -> None:
    """Ensures that a node full of the worst rank fits into host memory."""
    m, last, steps = inner.model, inner.group.pp - 1, int(inner.group.steps[0])
    room = inner.limits.host_bytes / float(m.local_ranks[0]) - float(m.fixed_host_bytes[0])
    unit = unit_for(max(room, 1.0))
    layer = to_integers(m.layer_host_bytes[0] / steps, unit, "up")
    for rank in range(inner.group.pp):
        ends = (float(rank == 0) * m.first_host_bytes[0] + float(rank == last) * m.last_host_bytes[0]) / steps
        used = _dot(layer, variables.offloaded[rank]) + to_integer(float(ends), unit, "up") * variables.step
        model.add(used <= to_integer(room, unit, "down"))


def _dot(coefficients: list[int], counts: list[Expr]) -> Expr:
    return sum(c * count for c, count in zip(coefficients, counts, strict=True))
