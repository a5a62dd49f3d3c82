"""Fits factors on the published constants to a handful of somebody's own runs of one accelerator and framework.

What is fitted grows with the number of runs: one run can only say how fast everything is together; three tell
communication and 8-bit formats from the rest; five also network, kernel launches and the fixed part of a step.  A prior
around 1 keeps what the runs say nothing about, and outliers count linearly."""

from __future__ import annotations

import datetime
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.accuracy.comparison.classes import not_a_step
from planner.accuracy.comparison.report import framework_of
from planner.accuracy.fits.fitting import Minimum, minimise
from planner.accuracy.predict import cases_of, predict
from planner.accuracy.runs.interpret import Case
from planner.accuracy.runs.records import Records
from planner.backends.stacks import DEFAULT_STACK
from planner.cost.constants import ConstantTable, published_constants
from planner.errors import InputError
from planner.specs.batch import FloatArray
from planner.specs.measurement import MeasuredRun
from planner.specs.problems import shown
from planner.specs.profile import LEAST_FACTOR, MOST_FACTOR, CalibratedFactor, Calibration, Profile, ProfileRun
from planner.units import GIB, counted, duration, percent
from planner.version import __version__

WHERE = "--from-records"
LARGEST_CONTRADICTION = 0.25
"""Two runs of one configuration further apart than this cannot both be the machine's speed."""
MOST_LEFT_OUT = 12
"""Runs up to which every run is also predicted from the others."""
_SHOWN_REASONS = _SHOWN_NAMES = 4
"""Of what is listed in an error message."""
_NOISE = 0.02
"""Error that two runs of one configuration may have, too."""
_UNDETERMINED = 0.3
"""Below this share of information from the runs, a factor is mostly its prior."""
_COMMUNICATION = ("fabric_bus_share", "network_share")
_NARROW = ("gemm_share_fp8", "gemm_share_fp4")
_RATES = (
    *("gemm_share", "gemm_share_fp8", "gemm_share_fp4", "attention_forward_share", "attention_backward_share"),
    *("stream_share", "optimizer_traffic_share", "cpu_adam_bytes_per_s", *_COMMUNICATION),
)
_HOST_TIMES = (
    *("launch_s", "moe_host_s", "blocking_launch_s"),
    *("stage_sync_s", "staged_collective_host_s"),
)
_TIMES = (*_HOST_TIMES, "fabric_latency_s", "network_latency_s", "network_hop_s", "step_overhead_s")
NEEDS = (
    "a run needs measured.step_time_s, model, hardware.gpu, hardware.gpus, run.global_batch and the parallel degrees; "
    "docs/accuracy.md describes a record"
)


@dataclass(frozen=True)
class Knob:
    """One factor that runs can determine, and the constants it acts on."""

    name: str
    meaning: str
    runs: int
    """Runs from which on it is fitted."""
    spread: float
    """Standard deviation of its logarithm before anything was measured."""
    low: float
    high: float
    multiplies: tuple[str, ...]
    divides: tuple[str, ...] = ()


KNOBS = (
    Knob("speed", "how fast everything runs together", 1, 0.6, 0.2, 2.5, _RATES, _TIMES),
    Knob("communication", "collectives, beside the speed", 3, 0.4, 0.2, 4.0, _COMMUNICATION),
    Knob(
        "narrow formats",
        "8- and 4-bit matrix multiplications, beside the speed",
        3,
        0.3,
        0.3,
        3.0,
        _NARROW,
    ),
    Knob("network", "collectives between nodes, beside both", 5, 0.4, 0.2, 4.0, ("network_share",)),
    Knob("launch", "host time of kernels", 5, 0.4, 0.2, 5.0, _HOST_TIMES),
    Knob("step overhead", "fixed time of a step", 5, 0.7, 0.1, 20.0, ("step_overhead_s",)),
)
MEMORY = Knob("memory", "peak memory of a rank, before context and buffers", 1, 0.3, 0.4, 2.5, ())
"""Needs runs with measured.peak_mem_gib."""


def calibrate(records: Records) -> Calibration:
    """The profile that the runs support; raises InputError where they are too few or contradict each other."""
    cases, reasons = priceable(records.runs)
    timed = [case for case in cases if case.timed and case.run.measured.step_time_s is not None]
    if not timed:
        raise _too_little(records, reasons)
    accelerator = _single([case.context.cluster.accelerator.id for case in cases], "accelerators")
    framework = _single([framework_of(case.run) for case in cases], "frameworks")
    configurations = _check_repeats(timed)
    remembered = [case for case in cases if case.run.measured.peak_mem_gib is not None]
    times, knobs = _fit_times(timed, configurations)
    memory = _fit_memory(remembered)
    fitted = [_factor(knob, times, index) for index, knob in enumerate(knobs)]
    fitted += [_factor(MEMORY, memory, 0)] if memory is not None else []
    factors = _factors(knobs, times.logs)
    for name, value in factors.items():
        _check_plausible(name, "all factors on it together", value, LEAST_FACTOR, MOST_FACTOR)
    memory_factor = math.exp(memory.logs[0]) if memory is not None else 1.0
    runs = _runs(timed, remembered, factors, memory_factor)
    left_out = [run.error_left_out for run in runs if run.error_left_out is not None]
    profile = Profile(
        planner_version=__version__,
        created=datetime.date.today().isoformat(),
        accelerator=accelerator,
        framework=framework,
        factors={name: _rounded(value) for name, value in factors.items()},
        memory_factor=_rounded(memory_factor),
        fitted=tuple(fitted),
        runs=runs,
    )
    after = [run.error_after for run in runs if run.error_after is not None]
    return Calibration(
        profile=profile,
        median_before=_median([run.error_before for run in runs if run.error_before is not None]),
        median_after=_median(after),
        median_left_out=_median(left_out) if left_out else None,
        not_fitted=_not_fitted(knobs, configurations, memory),
        warnings=(*_worse(runs), *_warnings(fitted, cases), *_above_peak(timed, factors)),
        problems=tuple(records.problems),
        skipped=reasons,
    )


def check_alone(case: Case) -> None:
    """Raise InputError where a fit to this run alone asks for an implausible factor."""
    if case.run.measured.step_time_s is not None:
        times, knobs = _fit_times([case], 1)
        for index, knob in enumerate(knobs):
            _factor(knob, times, index)
    if case.run.measured.peak_mem_gib is not None and (memory := _fit_memory([case])) is not None:
        _factor(MEMORY, memory, 0)


def priceable(runs: Sequence[MeasuredRun]) -> tuple[list[Case], dict[str, str]]:
    """Runs that can be priced and state something to fit to, and by id why the others are left out."""
    cases, skipped = cases_of(runs)
    reasons = {prediction.id: prediction.skipped or "" for prediction in (*skipped, *predict(cases))}
    reasons |= {case.run.id: _unusable(case) for case in cases if not reasons[case.run.id]}
    return [case for case in cases if not reasons[case.run.id]], {name: why for name, why in reasons.items() if why}


def _unusable(case: Case) -> str:
    """Why nothing can be fitted to a run; empty if something can."""
    measured = case.run.measured
    if measured.oom is True:
        return "ended out of memory"
    if (reason := not_a_step(case.run)) is not None:
        return reason
    if measured.peak_mem_gib is not None or (measured.step_time_s is not None and case.timed):
        return ""
    return "neither step time nor peak memory stated" if measured.step_time_s is None else "global batch not stated"


def _too_little(records: Records, reasons: dict[str, str]) -> InputError:
    said = "; ".join([*dict.fromkeys(reasons.values())][:_SHOWN_REASONS])
    unreadable = f", {counted(len(records.problems), 'unreadable line')}" if records.problems else ""
    return InputError(
        "no run with a step time can be used",
        where=WHERE,
        got=counted(len(records.runs), "record") + unreadable + (f" ({said})" if said else ""),
        allowed="at least one run with its step time",
        hint=NEEDS,
    )


def _single(names: Sequence[str], what: str) -> str:
    found = sorted(set(names))
    if len(found) > 1:
        raise InputError(
            f"the runs are of several {what}",
            where=WHERE,
            got=", ".join(shown(name) for name in found[:_SHOWN_NAMES]) + (", ..." if found[_SHOWN_NAMES:] else ""),
            allowed="one accelerator and one framework",
            hint="calibrate each of them from a file of its own",
        )
    return found[0]


def _check_repeats(cases: Sequence[Case]) -> int:
    """Number of different configurations; repeats must agree."""
    repeats: dict[str, list[MeasuredRun]] = defaultdict(list)
    for case in cases:
        run = case.run
        configuration = run.run.model_dump_json(exclude={"version"})
        repeats[run.model.model_dump_json() + run.hardware.model_dump_json() + configuration].append(run)
    for runs in repeats.values():
        fast, slow = (choose(runs, key=lambda run: run.measured.step_time_s or 0.0) for choose in (min, max))
        fastest, slowest = fast.measured.step_time_s or 0.0, slow.measured.step_time_s or 0.0
        if slowest > fastest * (1.0 + LARGEST_CONTRADICTION):
            raise InputError(
                "two runs of one configuration contradict each other",
                where=WHERE,
                got=f"{shown(fast.id)}: {duration(fastest)} a step, {shown(slow.id)}: {duration(slowest)}",
                allowed=f"at most {percent(LARGEST_CONTRADICTION)} apart",
                hint="leave out the one that was disturbed (first steps, data loading, a slow node), or state the "
                "setting in which they differ",
            )
    return len(repeats)


def _knobs(configurations: int) -> list[Knob]:
    return [knob for knob in KNOBS if configurations >= knob.runs]


def _factors(knobs: Sequence[Knob], logs: FloatArray) -> dict[str, float]:
    """Factor on each constant: the product of the knobs that act on it."""
    total: dict[str, float] = defaultdict(float)
    for knob, log in zip(knobs, logs, strict=True):
        for name in knob.multiplies:
            total[name] += float(log)
        for name in knob.divides:
            total[name] -= float(log)
    return {name: math.exp(log) for name, log in total.items()}


def describes(profile: Profile) -> bool:
    """Whether what the profile says of its fit is what its factors do; not where somebody edited them."""
    knobs = {knob.name: knob for knob in (*KNOBS, MEMORY)}
    said = {factor.name: factor.factor for factor in profile.fitted}
    if not said or not set(said) <= set(knobs):
        return False
    memory = said.pop(MEMORY.name, 1.0)
    logs = np.log(np.array([*said.values()]))
    factors = _factors([knobs[name] for name in said], logs)
    pairs = [
        (memory, profile.memory_factor),
        *((value, profile.factors.get(name, 1.0)) for name, value in factors.items()),
    ]
    return set(profile.factors) <= set(factors) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


def _table(factors: dict[str, float]) -> ConstantTable:
    return published_constants().with_factors(factors)


def _time_errors(cases: Sequence[Case], factors: dict[str, float]) -> FloatArray:
    """log(predicted / measured) of the step times."""
    measured = [case.run.measured.step_time_s or math.nan for case in cases]
    predicted = [prediction.step_time_s or math.nan for prediction in predict(cases, _table(factors))]
    errors: FloatArray = np.log(np.array(predicted) / np.array(measured))
    return errors


def _memory_errors(cases: Sequence[Case], memory_factor: float) -> FloatArray:
    """log(predicted / measured) of the peak memory."""
    measured = [(case.run.measured.peak_mem_gib or math.nan) * GIB for case in cases]
    predicted = [p.peak_memory_bytes or math.nan for p in predict(cases, memory_factor=memory_factor)]
    errors: FloatArray = np.log(np.array(predicted) / np.array(measured))
    return errors


def _fit_times(cases: Sequence[Case], configurations: int) -> tuple[Minimum, list[Knob]]:
    knobs = _knobs(configurations)
    return _fitted(lambda logs: _time_errors(cases, _factors(knobs, logs)), knobs, len(cases)), knobs


def _fit_memory(cases: Sequence[Case]) -> Minimum | None:
    if not cases:
        return None
    return _fitted(lambda logs: _memory_errors(cases, math.exp(logs[0])), [MEMORY], len(cases))


def _fitted(errors_at: Callable[[FloatArray], FloatArray], knobs: Sequence[Knob], rows: int) -> Minimum:
    zeros = np.zeros(len(knobs))
    spread = np.array([knob.spread for knob in knobs])
    return minimise(errors_at, zeros, zeros, spread, np.ones(rows))


def _factor(knob: Knob, found: Minimum, index: int) -> CalibratedFactor:
    factor = math.exp(float(found.logs[index]))
    _check_plausible(knob.name, knob.meaning, factor, knob.low, knob.high)
    return CalibratedFactor(
        name=knob.name,
        meaning=knob.meaning,
        factor=_rounded(factor),
        low=knob.low,
        high=knob.high,
        determined=round(float(found.determined[index]), 3),
    )


def _check_plausible(name: str, meaning: str, factor: float, low: float, high: float) -> None:
    if not low <= factor <= high:
        raise InputError(
            f"the runs ask for an implausible factor on {name} ({meaning})",
            where=WHERE,
            got=f"{factor:.3g} times the published value",
            allowed=f"from {low:g} to {high:g}",
            hint="check GPU, GPU count, batch, sequence length and recomputation, and that step_time_s is the time of "
            "a whole optimizer step in seconds",
        )


def _runs(
    timed: Sequence[Case], remembered: Sequence[Case], factors: dict[str, float], memory_factor: float
) -> tuple[ProfileRun, ...]:
    """Every run with its errors before and after."""
    rows: dict[str, dict[str, float | str | None]] = defaultdict(dict)
    left_out = _left_out(timed)
    before, after = _time_errors(timed, {}), _time_errors(timed, factors)
    for index, case in enumerate(timed):
        rows[case.run.id] |= {
            "measured_step_time_s": case.run.measured.step_time_s,
            "error_before": _relative(before[index]),
            "error_after": _relative(after[index]),
            "error_left_out": _relative(left_out[index]) if left_out is not None else None,
        }
    if remembered:
        before, after = _memory_errors(remembered, 1.0), _memory_errors(remembered, memory_factor)
        for index, case in enumerate(remembered):
            rows[case.run.id] |= {
                "measured_peak_memory_bytes": (case.run.measured.peak_mem_gib or 0.0) * GIB,
                "memory_error_before": _relative(before[index]),
                "memory_error_after": _relative(after[index]),
            }
    return tuple(ProfileRun.model_validate({"id": name, **row}) for name, row in rows.items())


def _left_out(cases: Sequence[Case]) -> FloatArray | None:
    """Error of each run with a profile of the others; None for a single run or for many."""
    if not 2 <= len(cases) <= MOST_LEFT_OUT:
        return None
    errors = np.zeros(len(cases))
    for index, case in enumerate(cases):
        others = [other for position, other in enumerate(cases) if position != index]
        found, knobs = _fit_times(others, _check_repeats(others))
        errors[index] = _time_errors([case], _factors(knobs, found.logs))[0]
    return errors


def _not_fitted(knobs: Sequence[Knob], configurations: int, memory: Minimum | None) -> tuple[str, ...]:
    waiting = [
        f"{knob.name} ({knob.meaning}): from {knob.runs} different configurations on, {configurations} given"
        for knob in KNOBS
        if knob not in knobs
    ]
    if memory is None:
        waiting.append(f"{MEMORY.name} ({MEMORY.meaning}): no run states measured.peak_mem_gib")
    return tuple(waiting)


def _worse(runs: Sequence[ProfileRun]) -> list[str]:
    """Whether the runs predict each other worse than the published constants do."""
    pairs = [
        (run.error_before, run.error_left_out)
        for run in runs
        if run.error_before is not None and run.error_left_out is not None
    ]
    if not pairs:
        return []
    before, others = (_median(errors) for errors in zip(*pairs, strict=True))
    if others <= max(before, _NOISE):
        return []
    return [
        f"predicted from the others, the runs are {percent(others)} off, with the published constants "
        f"{percent(before)}: they have no common cause, so do not use this profile; check the records, or add more runs"
    ]


def _warnings(fitted: Sequence[CalibratedFactor], cases: Sequence[Case]) -> tuple[str, ...]:
    found = [
        f"{factor.name}: these runs say little about it, so it stays near 1"
        for factor in fitted
        if factor.determined < _UNDETERMINED
    ]
    assumed = dict.fromkeys(text for case in cases for text in case.assumed)
    unknown = sorted({framework_of(case.run) for case in cases if not case.known_stack})
    return (
        *found,
        *(f"{name} is outside measured experience and priced like {DEFAULT_STACK}" for name in unknown),
        *(f"assumed for the runs: {text}" for text in assumed),
    )


def _above_peak(cases: Sequence[Case], factors: dict[str, float]) -> list[str]:
    """Shares of a hardware peak that the factors push above 1."""
    shares = {
        (name, getattr(case.context.constants, name) * factors.get(name, 1.0))
        for case in cases
        for name in _RATES
        if name.endswith("_share")
    }
    return [
        f"{name} becomes {value:.2f} of what the hardware can do: the runs probably do less work than their records say"
        for name, value in sorted(shares)
        if value > 1.0 and name in factors
    ]


def _relative(log_error: float) -> float:
    return round(math.expm1(float(log_error)), 6)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _median(errors: Sequence[float]) -> float:
    return round(statistics.median(abs(error) for error in errors), 6)
