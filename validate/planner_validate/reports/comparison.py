"""Puts what the ranks measured beside what the estimate says, term by term, and names the first suspect of each gap.

Only terms that both sides know are compared; terms.py folds the trees of the estimate into them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from planner.specs.plan import Estimate
from planner.specs.validation import (
    CollectiveUse,
    Comparison,
    GradientCheck,
    GroupKind,
    MemoryTerm,
    RankFailure,
    RankResult,
    RunEnvironment,
    RunMode,
    StepMeasure,
    ValidationReport,
)
from planner.version import __version__
from planner_validate.reports.suspects import memory_suspect, time_suspects, unsound
from planner_validate.reports.terms import (
    BETWEEN,
    FORWARD_BACKWARD,
    OPTIMIZER,
    allocated,
    phase_of,
    predicted_memory,
    predicted_times,
    predicted_traffic,
    reserved,
    stage_of,
    traffic_name,
)
from planner_validate.runs.plans import Prepared, device_of

SMALL_SHARE = 0.01
"""A part of the step below it is not a term of its own."""


@dataclass(frozen=True)
class StepTimes:
    """The steps of a run as one: of every step the slowest rank."""

    seconds: tuple[float, ...]
    forward_backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @property
    def between_s(self) -> tuple[float, ...]:
        """What is neither: reading tokens, averaging the loss, waiting at the barrier."""
        parts = zip(self.seconds, self.forward_backward_s, self.optimizer_s, strict=True)
        return tuple(max(0.0, whole - body - update) for whole, body, update in parts)


def step_times(results: Sequence[RankResult]) -> StepTimes | None:
    """The measured steps of all ranks; None where there are none."""
    counts = [len(result.steps) for result in results]
    if not counts or not min(counts):
        return None
    rows: list[tuple[StepMeasure, ...]] = list(zip(*(result.steps[: min(counts)] for result in results), strict=True))
    # Ranks wait for each other in the update, so the last one to arrive there tells how long the update itself takes.
    last = [max(row, key=lambda step: step.forward_backward_s) for row in rows]
    return StepTimes(
        seconds=tuple(max(step.seconds for step in row) for row in rows),
        forward_backward_s=tuple(step.forward_backward_s for step in last),
        optimizer_s=tuple(step.optimizer_s for step in last),
    )


def spread(values: Sequence[float]) -> float | None:
    """Half of the interquartile range over the median; None for fewer than three values."""
    middle = statistics.median(values)
    if len(values) < 3 or middle <= 0:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2.0 / middle


MemoryFigure = Literal["allocated", "reserved"]


def memory_figure(results: Iterable[RankResult]) -> MemoryFigure:
    """Which peak all ranks know: what the allocator reserved on GPUs, what was allocated elsewhere."""
    return "reserved" if all(result.peak_reserved_bytes is not None for result in results) else "allocated"


def peak_of(result: RankResult, figure: MemoryFigure) -> int | None:
    return result.peak_reserved_bytes if figure == "reserved" else result.peak_allocated_bytes


def worst_rank(results: Sequence[RankResult]) -> RankResult | None:
    """The rank with the highest peak."""
    figure = memory_figure(results)
    known = [result for result in results if peak_of(result, figure) is not None]
    return max(known, key=lambda result: peak_of(result, figure) or 0, default=None)


def compare_peak(estimate: Estimate, results: Sequence[RankResult]) -> Comparison | None:
    """Peak memory of the fullest rank against that of the fullest stage, both of the same figure."""
    worst = worst_rank(results)
    if worst is None:
        return None
    figure = memory_figure(results)
    phases = [phase_of(stage) for stage in estimate.memory.children]
    predicted = max(reserved(phase) if figure == "reserved" else allocated(phase) for phase in phases)
    low, high = (end / estimate.peak_memory_bytes for end in estimate.peak_memory_range_bytes)
    return Comparison(
        name=f"peak memory, {figure}, rank {worst.rank}",
        predicted=predicted,
        measured=peak_of(worst, figure),
        low=low * predicted,
        high=high * predicted,
    )


def compare_memory_terms(estimate: Estimate, results: Sequence[RankResult]) -> tuple[Comparison, ...]:
    """By term, of the fullest rank and its stage."""
    worst = worst_rank(results)
    if worst is None or not worst.memory:
        return ()
    predicted = predicted_memory(phase_of(stage_of(estimate, worst)))
    terms = (term for term in get_args(MemoryTerm) if predicted[term] or worst.memory.get(term))
    return tuple(
        Comparison(name=term, predicted=predicted[term], measured=float(worst.memory.get(term, 0))) for term in terms
    )


def compare_step(estimate: Estimate, times: StepTimes | None) -> Comparison | None:
    """Median step of the slowest rank."""
    if times is None:
        return None
    low, high = estimate.step_time_range_s
    return Comparison(
        name="step time",
        predicted=estimate.step_time_s,
        measured=statistics.median(times.seconds),
        low=low,
        high=high,
        spread=spread(times.seconds),
    )


def compare_time_terms(
    estimate: Estimate, times: StepTimes | None, collectives: Sequence[CollectiveUse]
) -> tuple[Comparison, ...]:
    """Parts of the step, then the waiting for each kind of group, which is inside of them."""
    if times is None:
        return ()
    predicted = predicted_times(estimate.time)
    measured = {FORWARD_BACKWARD: times.forward_backward_s, OPTIMIZER: times.optimizer_s}
    rows = [
        Comparison(name=name, predicted=predicted[name], measured=statistics.median(values), spread=spread(values))
        for name, values in measured.items()
    ]
    between = statistics.median(times.between_s)
    if between > SMALL_SHARE * statistics.median(times.seconds):
        rows.append(Comparison(name=BETWEEN, predicted=0.0, measured=between, spread=spread(times.between_s)))
    waits, seen = predicted_traffic(estimate.time), measured_traffic(collectives)
    kinds = [kind for kind in get_args(GroupKind) if kind in waits or kind in seen]
    rows += [
        Comparison(name=traffic_name(kind), predicted=waits.get(kind, 0.0), measured=seen.get(kind)) for kind in kinds
    ]
    return tuple(rows)


def measured_traffic(collectives: Iterable[CollectiveUse]) -> dict[GroupKind, float]:
    """Seconds in collectives by kind of group; kinds without times are left out."""
    seconds: dict[GroupKind, float] = {}
    for use in collectives:
        if use.seconds is not None:
            seconds[use.group] = seconds.get(use.group, 0.0) + use.seconds
    return seconds


def busiest(results: Sequence[RankResult]) -> tuple[CollectiveUse, ...]:
    """The collectives of the rank that sends most."""
    sender = max(results, key=lambda result: sum(use.sent_bytes for use in result.collectives), default=None)
    return () if sender is None else sender.collectives


def mean_losses(results: Sequence[RankResult]) -> tuple[float, ...]:
    """Losses of the steps, warm-up included, by the rank that knows most of them."""
    known = [
        tuple(step.loss for step in (*result.warmup, *result.steps) if step.loss is not None) for result in results
    ]
    return max(known, key=len, default=())


def steps_made(results: Sequence[RankResult]) -> int:
    """Optimizer steps of a rank, warm-up included."""
    return max((len(result.warmup) + len(result.steps) for result in results), default=0)


def worst_gradients(results: Iterable[RankResult]) -> GradientCheck | None:
    """The check of the rank whose gradients differ most."""
    checks = [result.gradients for result in results if result.gradients is not None]
    return max(checks, key=lambda check: check.largest_relative_error, default=None)


def environment_of(found: Prepared, results: Sequence[RankResult]) -> RunEnvironment:
    """Devices, hosts and versions as the ranks tell them."""
    names = dict.fromkeys(result.device_name for result in results if result.device_name)
    versions: dict[str, str] = {}
    for result in results:
        versions |= result.versions
    return RunEnvironment(
        device=", ".join(names) or device_of(found.document),
        devices=max((result.world_size for result in results), default=found.gpus),
        hosts=tuple(dict.fromkeys(result.host for result in results if result.host)),
        versions=versions,
    )


def report(
    found: Prepared,
    results: Sequence[RankResult],
    failures: Sequence[RankFailure] = (),
    *,
    mode: RunMode = "run",
    notes: Sequence[str] = (),
) -> ValidationReport:
    """The whole comparison of a run with the estimate of what ran."""
    estimate = found.estimate
    # A step counts when every rank has made it; ranks that were ended early have made fewer.
    whole = len(results) == found.gpus
    times = step_times(results) if whole or mode != "run" else None
    collectives = busiest(results)
    step, peak = compare_step(estimate, times), compare_peak(estimate, results) if results else None
    terms, parts = compare_time_terms(estimate, times, collectives), compare_memory_terms(estimate, results)
    gradients, losses = worst_gradients(results), mean_losses(results)
    profiled = found.document.request.profile is not None
    # JSON has no number for a loss that is none, so such a step is without.
    lost = mode == "run" and len(losses) < steps_made(results)
    wrong = unsound(gradients, losses, finite=not lost)
    told: list[str] = list(wrong)
    if step is not None and not step.within:
        causes = time_suspects(step, terms, profiled=profiled)
        step = step.model_copy(update={"suspect": causes[0]})
        told += causes
    if peak is not None and not peak.within:
        cause = memory_suspect(peak, parts)
        peak = peak.model_copy(update={"suspect": cause})
        told.append(cause)
    compared = [each for each in (step, peak) if each is not None]
    return ValidationReport(
        planner_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mode=mode,
        plan_id=found.planned.id,
        planned_for=found.planned.best.backend,
        request=found.document.request,
        strategy=found.document.best.strategy,
        changed=found.changed,
        estimate=estimate,
        environment=environment_of(found, results),
        step_time=step,
        peak_memory=peak,
        time_terms=terms,
        memory_terms=parts,
        collectives=collectives,
        gradients=gradients,
        losses=losses,
        ranks=tuple(results),
        failures=tuple(failures),
        verdict=verdict(failures, wrong, compared),
        suspects=tuple(dict.fromkeys(told)),
        notes=(*found.notes, *notes, *_about(results, times, mode)),
    )


def verdict(
    failures: Sequence[RankFailure], wrong: Sequence[str], compared: Sequence[Comparison]
) -> Literal["within", "outside", "failed"]:
    """Failed: did not run to its end, or trained wrongly; else whether time and memory are in the stated ranges."""
    if failures or wrong or not compared:
        return "failed"
    return "within" if all(each.within for each in compared) else "outside"


def _about(results: Sequence[RankResult], times: StepTimes | None, mode: RunMode) -> list[str]:
    """What the figures are."""
    notes = []
    if times is not None:
        notes.append(
            f"step time: median of {len(times.seconds)} steps, each as long as its slowest rank took; spread: half of "
            "the interquartile range over the median"
        )
    if results and worst_rank(results) is None:
        notes.append("peak memory was not measured")
    elif results and memory_figure(results) == "allocated":
        notes.append("memory: largest sum of live tensors of a rank; interpreter and libraries are not in it")
    if any(result.collectives for result in results) and mode == "run":
        notes.append(
            "traffic: predicted is what a step waits for; measured is the time in collectives of one observed step, "
            "waiting for other ranks included"
        )
    return notes
