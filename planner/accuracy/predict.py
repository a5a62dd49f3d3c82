"""Predicts measured runs: step time, memory of the figure that the source prints, and whether the run fits.

Cases that share model, machines, job and stack are priced as one batch by the code that the search uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ValidationError

from planner.accuracy.fits.profiled import with_memory_factor
from planner.accuracy.runs.interpret import Case, interpret
from planner.accuracy.runs.skip import Skip
from planner.cost.constants import ConstantTable
from planner.cost.context import CostContext
from planner.cost.evaluate import fits, layer_counts, recomputed_counts, stage_model
from planner.cost.stage_model import StageModel, assemble
from planner.cost.uncertainty import Uncertainty, uncertainty_for
from planner.errors import PlannerError
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.measurement import MeasuredRun
from planner.specs.problems import input_error


@dataclass(frozen=True)
class Prediction:
    """What the model says of one record; None where the record does not allow it."""

    id: str
    step_time_s: float | None
    peak_memory_bytes: float | None
    """The figure that the source prints, of the rank that it prints."""
    fits: bool | None
    skipped: str | None = None
    assumed: tuple[str, ...] = ()
    peak_device_bytes: float | None = None
    """What the fullest GPU needs in all."""
    step_time_range_s: tuple[float, float] | None = None
    """80 % range of the class, wider where settings had to be filled in or the framework was never measured."""
    peak_memory_range_bytes: tuple[float, float] | None = None


def cases_of(runs: Sequence[MeasuredRun]) -> tuple[list[Case], list[Prediction]]:
    """Cases that can be priced, and predictions that only carry a reason why they cannot."""
    cases, skipped = [], []
    for run in runs:
        try:
            cases.append(interpret(run))
        except _UNUSABLE as problem:
            skipped.append(_not_priced(run, problem))
    return cases, skipped


_UNUSABLE = (Skip, PlannerError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a record with impossible or contradictory fields (``run.extra`` may hold anything) raises on its way through the
model; each becomes a reason."""


def _not_priced(run: MeasuredRun, problem: Exception) -> Prediction:
    if isinstance(problem, Skip):
        reason = problem.reason
    elif isinstance(problem, PlannerError):
        reason = problem.message
    elif isinstance(problem, ValidationError):
        said = input_error(problem, "")
        reason = ": ".join(
            (f"inconsistent {_SPECS.get(problem.title, 'model')}", *filter(None, (said.where, said.message)))
        )
    else:
        reason = "its fields cannot be used together"
    return Prediction(run.id, None, None, None, reason)


_SPECS = {"Cluster": "machines", "Job": "batch"}
"""What a record describes, by the spec that refuses it; everything else is part of the model."""


def predict(
    cases: Sequence[Case],
    table: ConstantTable | None = None,
    adjust: Callable[[StageModel], StageModel] | None = None,
    memory_factor: float = 1.0,
) -> list[Prediction]:
    """One prediction a case, in their order; with other constants than the published ones where a table is given, with
    changed coefficients where ``adjust`` changes them, and with the memory of a rank (before context and buffers) times
    ``memory_factor``."""

    def price(members: list[int]) -> dict[int, Prediction]:
        return _group([cases[index] for index in members], members, table, adjust, memory_factor)

    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        context, stages = case.context, int(case.batch.pp[0])
        groups[(context.model, context.cluster, context.job, id(context.backend), stages)].append(index)
    found: dict[int, Prediction] = {}
    for members in groups.values():
        found |= _guarded(cases, members, price)
    return [found[index] for index in range(len(cases))]


def _guarded(
    cases: Sequence[Case], members: list[int], price: Callable[[list[int]], dict[int, Prediction]]
) -> dict[int, Prediction]:
    """A group of cases; where one of them cannot be priced, the others are priced without it."""
    try:
        return price(members)
    except _UNUSABLE as problem:
        if len(members) == 1:
            return {members[0]: _not_priced(cases[members[0]].run, problem)}
        alone = (_guarded(cases, [member], price) for member in members)
        return {index: prediction for found in alone for index, prediction in found.items()}


def _group(
    cases: list[Case],
    indices: list[int],
    table: ConstantTable | None,
    adjust: Callable[[StageModel], StageModel] | None,
    memory_factor: float,
) -> dict[int, Prediction]:
    context = cases[0].context if table is None else replace(cases[0].context, table=table)
    context = replace(context, backend=with_memory_factor(context.backend, memory_factor))
    batch = StrategyBatch.concatenate([case.batch for case in cases])
    step = np.zeros(len(batch))
    memory = {kind: [np.zeros(0)] * len(batch) for kind in ("allocated", "reserved", "device")}
    peak, fit = np.zeros(len(batch)), np.zeros(len(batch), dtype=bool)
    for vpp in np.unique(batch.vpp):
        rows = np.flatnonzero(batch.vpp == vpp)
        part = batch.take(rows)
        model = stage_model(context, part)
        model = model if adjust is None else adjust(model)
        result = assemble(model, layer_counts(context, part), recomputed_counts(context, part), part.offload_optimizer)
        step[rows], peak[rows], fit[rows] = result.step_time_s, result.peak_memory_bytes, fits(context, result)
        reserved = result.rank_memory_bytes - model.device_overhead_bytes[:, None]
        for place, row in enumerate(rows):
            memory["allocated"][row] = reserved[place] / model.memory_factor[place] * memory_factor
            memory["reserved"][row] = reserved[place]
            memory["device"][row] = result.rank_memory_bytes[place]
    predictions, start = {}, 0
    for index, case in zip(indices, cases, strict=True):
        rows = np.arange(start, start + len(case.batch))
        start += len(case.batch)
        chosen = _chosen(rows, step, peak, context.memory_limit_bytes)
        figure = memory[case.memory_kind][chosen]
        rank = {"first": figure[0], "last": figure[-1]}.get(case.memory_rank, figure.max())
        if not (np.isfinite(step[chosen]) and np.isfinite(rank)):
            raise ValueError(f"{case.run.id}: the prediction is not finite")
        seconds = float(step[chosen])
        spread = uncertainty_of(context, assumed=bool(case.assumed) or not case.known_stack)
        predictions[index] = Prediction(
            case.run.id,
            seconds if case.timed else None,
            float(rank),
            bool(fit[chosen]),
            None,
            case.assumed,
            float(peak[chosen]),
            (seconds * spread.step_time_lower, seconds * spread.step_time_upper) if case.timed else None,
            (float(rank) * spread.memory_lower, float(rank) * spread.memory_upper),
        )
    return predictions


def uncertainty_of(context: CostContext, *, assumed: bool) -> Uncertainty:
    """The ranges of a run's class."""
    return uncertainty_for(
        context.backend.family, context.cluster.accelerator.id, context.job, context.model, assumed=assumed
    )


_CLEARLY_TOO_LARGE = 1.15
"""A setting that the source leaves open is ruled out where it needs this much more than the GPU has: the run ran, so
the estimate of its memory may be the part that is wrong."""


def _chosen(rows: IntArray, step: FloatArray, peak: FloatArray, limit: float) -> int:
    """The fastest setting that may have fitted, else the one that needs least memory."""
    possible = rows[peak[rows] <= _CLEARLY_TOO_LARGE * limit]
    return int(possible[np.argmin(step[possible])] if len(possible) else rows[np.argmin(peak[rows])])
