"""Compares predictions with what was measured: errors by group, fit and out of memory, ranking inside sweeps.

The figures are those that anybody gets from the predictions and the records alone; nothing is weighted or left out
beyond what classes.py says."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.accuracy.comparison.classes import GRID_SOURCES, class_of_run, excluded_from_time
from planner.accuracy.fits.validated import validation_of
from planner.accuracy.predict import Prediction, cases_of, predict
from planner.accuracy.runs.interpret import Case
from planner.accuracy.runs.records import PUBLIC, Records
from planner.catalog import load_accelerator
from planner.cost.constants import published_constants
from planner.errors import InputError
from planner.specs.accuracy import (
    AccuracyDocument,
    Errors,
    FitRow,
    Grouping,
    MemoryRow,
    NotPriced,
    RankingSummary,
    SweepRow,
    TimeRow,
)
from planner.specs.batch import FloatArray
from planner.specs.measurement import MeasuredRun, MemoryKind
from planner.specs.profile import Profile
from planner.units import GIB
from planner.version import __version__

SMALLEST_SWEEP = 10
"""Measured settings from which on a ranking says something."""
ALL = "all"
_DIGITS = 6
"""Decimals of a ratio in the document."""


@dataclass(frozen=True)
class Scored:
    """A record beside its prediction."""

    run: MeasuredRun
    prediction: Prediction
    memory_kind: MemoryKind | None
    """Which figure the record's memory is; None where the record cannot be priced."""
    gpu: str
    """Catalogue id, or the record's own word."""
    profiled: bool = False
    """Whether the prediction is by the profile."""

    @property
    def compared(self) -> bool:
        """The step time was measured and is a steady training step."""
        return self.run.measured.step_time_s is not None and excluded_from_time(self.run) is None

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time minus 1."""
        measured, predicted = self.run.measured.step_time_s, self.prediction.step_time_s
        if not self.compared or measured is None or predicted is None:
            return None
        return predicted / measured - 1.0

    @property
    def in_range(self) -> bool:
        """The measured step time lies in the predicted range."""
        measured, ends = self.run.measured.step_time_s, self.prediction.step_time_range_s
        return measured is not None and ends is not None and ends[0] <= measured <= ends[1]

    @property
    def memory_error(self) -> float | None:
        """The same of the peak memory."""
        measured, predicted = self.run.measured.peak_mem_gib, self.prediction.peak_memory_bytes
        return None if measured is None or predicted is None else predicted / (measured * GIB) - 1.0


def scored(runs: Sequence[MeasuredRun], profile: Profile | None = None) -> list[Scored]:
    """Every record with its prediction, in the order of the records; a profile counts on its own accelerator."""
    cases, skipped = cases_of(runs)
    mine = [profile is not None and case.context.cluster.accelerator.id == profile.accelerator for case in cases]
    plain = [case for case, calibrated in zip(cases, mine, strict=True) if not calibrated]
    own = [case for case, calibrated in zip(cases, mine, strict=True) if calibrated]
    predictions = [*predict(plain), *skipped]
    if profile is not None and own:
        table = published_constants().with_factors(profile.factors)
        predictions += predict(own, table, memory_factor=profile.memory_factor)
    return paired(runs, predictions, cases, frozenset(case.run.id for case in own))


def paired(
    runs: Iterable[MeasuredRun],
    predictions: Iterable[Prediction],
    cases: Iterable[Case],
    profiled: frozenset[str] = frozenset(),
) -> list[Scored]:
    """Records beside predictions of the same id; ``profiled`` are the ids of those that a profile made."""
    by_id = {prediction.id: prediction for prediction in predictions}
    known = {case.run.id: case for case in cases}
    rows = []
    for run in runs:
        case = known.get(run.id)
        kind = case.memory_kind if case else None
        rows.append(Scored(run, by_id[run.id], kind, _gpu_of(run), run.id in profiled))
    return rows


def _gpu_of(run: MeasuredRun) -> str:
    """Catalogue id of the accelerator, or the record's own word."""
    word = run.hardware.gpu or "not stated"
    try:
        return load_accelerator(word).id
    except InputError:
        return word


_GROUPS: dict[Grouping, Callable[[Scored], str]] = {
    "class": lambda row: class_of_run(row.run),
    "source": lambda row: row.run.source_name,
    "gpu": lambda row: row.gpu,
    "framework": lambda row: framework_of(row.run),
}


def framework_of(run: MeasuredRun) -> str:
    """The framework without version and remarks, as text that can be printed."""
    words = re.split(r"[\s(]", (run.run.framework or "").strip().lower())[0][:100]
    return "".join(letter for letter in words if letter.isprintable()) or "not stated"


def report(
    rows: Sequence[Scored], records: Records, *, name: str, by: Grouping = "class", profile: Profile | None = None
) -> AccuracyDocument:
    """The whole comparison as a document."""
    group = _GROUPS[by]
    sweeps = _sweeps(rows)
    skipped = [row for row in rows if row.prediction.skipped is not None]
    return AccuracyDocument(
        planner_version=__version__,
        records=name,
        by=by,
        read=len(records.runs),
        priced=len(rows) - len(skipped),
        profile=f"{profile.framework} on {profile.accelerator}" if profile else None,
        profiled=sum(row.profiled and row.prediction.skipped is None for row in rows),
        step_time=_time_rows(rows, group, validated=by == "class" and name == PUBLIC and profile is None),
        memory=_memory_rows(rows, group),
        fit=_fit_rows(rows, group),
        ranking=_summary([sweep for sweep in sweeps if sweep.grid]),
        sweeps=sweeps,
        excluded=_counted(_not_compared(row) for row in rows if row.run.measured.step_time_s is not None),
        skipped=_counted(row.prediction.skipped for row in skipped),
        not_priced=tuple(_not_priced(row, records) for row in skipped),
        problems=tuple(records.problems),
    )


def _not_compared(row: Scored) -> str | None:
    """Why a measured step time is not compared with one; None if it is, or if the record cannot be priced at all."""
    reason = excluded_from_time(row.run)
    if reason is None and row.prediction.skipped is None and row.prediction.step_time_s is None:
        return "global batch not stated, so no whole step can be predicted"
    return reason


def _counted(reasons: Iterable[str | None]) -> dict[str, int]:
    """How often each reason occurs, most frequent first."""
    counts = Counter(reason for reason in reasons if reason is not None)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _not_priced(row: Scored, records: Records) -> NotPriced:
    place = records.places.get(row.run.id)
    return NotPriced(
        id=row.run.id,
        reason=row.prediction.skipped or "",
        file=place.file if place else "",
        line=place.line if place else None,
    )


def errors_of(values: Sequence[float]) -> Errors:
    """Median, 90th percentile and mean of relative errors; at least one value."""
    sizes = sorted(abs(value) for value in values)
    return Errors(
        rows=len(sizes),
        median=round(statistics.median(sizes), _DIGITS),
        p90=round(sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], _DIGITS),
        bias=round(statistics.fmean(values), _DIGITS),
    )


def _grouped(rows: Iterable[Scored], group: Callable[[Scored], str]) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        found[group(row)].append(row)
    return dict(sorted(found.items()))


def _with_all(groups: Mapping[str, list[Scored]]) -> list[tuple[str, list[Scored]]]:
    """The groups, and all rows together at the end."""
    return [*groups.items(), (ALL, [row for rows in groups.values() for row in rows])]


def _time_rows(rows: Sequence[Scored], group: Callable[[Scored], str], *, validated: bool) -> tuple[TimeRow, ...]:
    """``validated``: the classes of the public records have out-of-fold errors beside the fitted ones."""
    found = []
    for name, members in _with_all(_grouped((row for row in rows if row.compared), group)):
        priced = [row for row in members if row.time_error is not None]
        skipped = sum(row.prediction.skipped is not None for row in members)
        if not priced and not skipped:
            continue
        found.append(
            TimeRow(
                group=name,
                errors=errors_of([row.time_error or 0.0 for row in priced]) if priced else None,
                skipped=skipped,
                assumed=round(sum(bool(row.prediction.assumed) for row in priced) / max(len(priced), 1), _DIGITS),
                in_range=round(sum(row.in_range for row in priced) / len(priced), _DIGITS) if priced else None,
                validation=validation_of(name) if validated else None,
            )
        )
    return tuple(found)


def _memory_rows(rows: Sequence[Scored], group: Callable[[Scored], str]) -> tuple[MemoryRow, ...]:
    found = []
    for name, members in _with_all(_grouped((row for row in rows if row.memory_error is not None), group)):
        by_kind = {kind: [row for row in members if row.memory_kind == kind] for kind in _KINDS}
        present = {kind: part for kind, part in by_kind.items() if part}
        if members:
            found.append(MemoryRow(group=name, kind="any", errors=_memory_errors(members)))
        found += [MemoryRow(group=name, kind=kind, errors=_memory_errors(part)) for kind, part in present.items()]
    return tuple(found)


_KINDS: tuple[MemoryKind, ...] = ("allocated", "reserved", "device")


def _memory_errors(rows: Sequence[Scored]) -> Errors:
    return errors_of([row.memory_error or 0.0 for row in rows])


def _fit_rows(rows: Sequence[Scored], group: Callable[[Scored], str]) -> tuple[FitRow, ...]:
    """Runs known to have run (with a step time) or to have ended out of memory."""
    found = []
    for name, members in _with_all(_grouped((row for row in rows if row.prediction.skipped is None), group)):
        counts = Counter(outcome for row in members if (outcome := _outcome(row)) is not None)
        if counts:
            found.append(FitRow(group=name, **counts))
    return tuple(found)


def _outcome(row: Scored) -> str | None:
    measured = row.run.measured
    said = "said_fits" if row.prediction.fits else "said_not"
    if measured.oom is True:
        return f"oom_{said}"
    if measured.oom is False and measured.step_time_s is not None:
        return f"ran_{said}"
    return None


def _sweeps(rows: Sequence[Scored]) -> tuple[SweepRow, ...]:
    """Groups of rows that differ in their layout only, with enough of them."""
    groups: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for row in rows:
        if row.time_error is not None and row.run.run.global_batch is not None:
            groups[_sweep_key(row)].append(row)
    found = [_sweep(members) for members in groups.values() if len(members) >= SMALLEST_SWEEP]
    return tuple(sorted(found, key=lambda sweep: (not sweep.grid, sweep.source, sweep.model, sweep.gpus)))


def _sweep_key(row: Scored) -> tuple[object, ...]:
    run = row.run
    shape = (run.source_name, run.model.name, run.hardware.gpus, run.model.seq_len, run.run.global_batch)
    if _is_grid(run):
        return shape
    # Elsewhere a table mixes machines, releases and number formats of one model.
    return (*shape, row.gpu, run.run.framework, run.run.version, run.run.precision)


def _is_grid(run: MeasuredRun) -> bool:
    return run.source_name.startswith(GRID_SOURCES)


def _sweep(rows: Sequence[Scored]) -> SweepRow:
    run = rows[0].run
    measured = np.array([row.run.measured.step_time_s for row in rows], dtype=float)
    predicted = np.array([row.prediction.step_time_s for row in rows], dtype=float)
    order = np.argsort(predicted, kind="stable")
    best = measured.min()
    return SweepRow(
        source=run.source_name,
        model=run.model.name,
        gpus=run.hardware.gpus or 0,
        seq_len=run.model.seq_len,
        global_batch=run.run.global_batch or 0,
        rows=len(rows),
        grid=_is_grid(run),
        regret=round(float(measured[order[0]] / best - 1.0), _DIGITS),
        top3_regret=round(float(measured[order[:3]].min() / best - 1.0), _DIGITS),
        spearman=round(_spearman(measured, predicted), _DIGITS),
    )


def _spearman(left: FloatArray, right: FloatArray) -> float:
    """Rank correlation; equal values share the last of their ranks, constant ones correlate with nothing."""
    ranks = [np.searchsorted(np.sort(values), values, side="right").astype(float) for values in (left, right)]
    a, b = (values - values.mean() for values in ranks)
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _summary(sweeps: Sequence[SweepRow]) -> RankingSummary | None:
    if not sweeps:
        return None
    regrets = [sweep.regret for sweep in sweeps]
    return RankingSummary(
        sweeps=len(sweeps),
        regret_mean=round(statistics.fmean(regrets), _DIGITS),
        regret_median=round(statistics.median(regrets), _DIGITS),
        regret_max=max(regrets),
        top3_regret_mean=round(statistics.fmean(sweep.top3_regret for sweep in sweeps), _DIGITS),
        spearman_median=round(statistics.median(sweep.spearman for sweep in sweeps), _DIGITS),
    )
