"""Predicts measured runs: step time, memory of the figure that the source prints, and whether the run fits.

Cases that share model, machines, job and stack are priced as one batch by the code that the search uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.accuracy.interpret import Case, interpret
from planner.accuracy.skip import Skip
from planner.cost.constants import ConstantTable
from planner.cost.evaluate import assembled, fits
from planner.specs.batch import StrategyBatch
from planner.specs.measurement import MeasuredRun


@dataclass(frozen=True)
class Prediction:
    """What the model says of one record; None where the record does not allow it."""

    id: str
    step_time_s: float | None
    peak_memory_bytes: float | None
    fits: bool | None
    skipped: str | None = None
    assumed: tuple[str, ...] = ()


def cases_of(runs: Sequence[MeasuredRun]) -> tuple[list[Case], list[Prediction]]:
    """Records that can be priced, and the others with their reasons."""
    cases, skipped = [], []
    for run in runs:
        try:
            cases.append(interpret(run))
        except Skip as problem:
            skipped.append(Prediction(run.id, None, None, None, problem.reason))
    return cases, skipped


def predict(cases: Sequence[Case], table: ConstantTable | None = None) -> list[Prediction]:
    """One prediction a case, in their order; with other constants than the published ones where a table is given."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        context, batch = case.context, case.batch
        shape = (int(batch.pp[0]), tuple(batch.vpp.tolist()))
        groups[(context.model, context.cluster, context.job, id(context.backend), shape[0])].append(index)
    found: dict[int, Prediction] = {}
    for members in groups.values():
        found |= _group([cases[index] for index in members], members, table)
    return [found[index] for index in range(len(cases))]


def _group(cases: list[Case], indices: list[int], table: ConstantTable | None) -> dict[int, Prediction]:
    context = cases[0].context if table is None else replace(cases[0].context, table=table)
    batch = StrategyBatch.concatenate([case.batch for case in cases])
    step = np.zeros(len(batch))
    memory = {kind: [np.zeros(0)] * len(batch) for kind in ("allocated", "reserved", "device")}
    peak, fit = np.zeros(len(batch)), np.zeros(len(batch), dtype=bool)
    for vpp in np.unique(batch.vpp):
        rows = np.flatnonzero(batch.vpp == vpp)
        model, result = assembled(context, batch.take(rows))
        step[rows], peak[rows], fit[rows] = result.step_time_s, result.peak_memory_bytes, fits(context, result)
        allocated = (result.rank_memory_bytes - model.device_overhead_bytes[:, None]) / model.memory_factor[:, None]
        for place, row in enumerate(rows):
            memory["allocated"][row] = allocated[place]
            memory["reserved"][row] = allocated[place] * model.memory_factor[place]
            memory["device"][row] = result.rank_memory_bytes[place]
    predictions, start = {}, 0
    for index, case in zip(indices, cases, strict=True):
        rows = np.arange(start, start + len(case.batch))
        start += len(case.batch)
        row = _chosen(rows, step, peak, context.memory_limit_bytes)
        figure = memory[case.memory_kind][row]
        rank = {"first": figure[0], "last": figure[-1]}.get(case.memory_rank, figure.max())
        predictions[index] = Prediction(
            case.run.id, float(step[row]) if case.timed else None, float(rank), bool(fit[row]), None, case.assumed
        )
    return predictions


def _chosen(rows: np.ndarray, step: np.ndarray, peak: np.ndarray, limit: float) -> int:  # type: ignore[type-arg]
    """The fastest setting that fits by the point estimate (the run is known to have started), else the one that needs
    least memory."""
    fitting = rows[peak[rows] <= limit]
    return int(fitting[np.argmin(step[fitting])] if len(fitting) else rows[np.argmin(peak[rows])])
