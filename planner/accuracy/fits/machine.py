"""Turns what was timed on one machine into factors on the published constants of its accelerator.

Every kind of work determines the constants of its own formula, in an order in which each fit rests on what the ones
before it found; a prior around the published value keeps what the measurements say nothing about."""

from __future__ import annotations

import datetime
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.accuracy.fits.fitting import minimise
from planner.accuracy.fits.hosts import TrainingRun, compared, fit_hosts
from planner.accuracy.fits.pieces import Pieces
from planner.backends.base import Backend
from planner.cost.constants import Constants, meaning_of, published_constants
from planner.specs.batch import FloatArray
from planner.specs.benchmark import BenchmarkKind
from planner.specs.cluster import Cluster
from planner.specs.profile import (
    LEAST_FACTOR,
    MOST_FACTOR,
    CalibratedFactor,
    MachineCalibration,
    MachineMeasurement,
    Profile,
)
from planner.units import percent
from planner.version import __version__

_GEMMS: tuple[BenchmarkKind, ...] = ("gemm forward", "gemm input gradient", "gemm weight gradient")
_ATTENTION: tuple[BenchmarkKind, ...] = ("attention forward", "attention backward")
_TRAFFIC: tuple[BenchmarkKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
_ISSUED: tuple[tuple[BenchmarkKind, ...], ...] = (
    *(_GEMMS, ("attention forward",), ("attention backward",), ("elementwise",), ("loss",)),
)
"""Kinds whose smallest benchmark tells what it takes to issue the others of the same group."""
_UNDETERMINED = 0.05
"""Below this share of information from the measurements, a constant is left as published."""
_LARGE_RESIDUAL = 0.3
"""Median error of a kind of benchmark above which the formula does not describe the machine."""
_NOISY = 0.15
"""Spread above which a measurement was disturbed."""


@dataclass(frozen=True)
class Stage:
    """Constants that one kind of work determines, beside what earlier stages found."""

    kinds: tuple[BenchmarkKind, ...]
    constants: tuple[str, ...]
    narrow: bool = False
    """Of 8-bit measurements only; others leave them out."""


STAGES = (
    Stage(("copy",), ("stream_share",)),
    Stage(_GEMMS, ("gemm_share", "gemm_half_k", "gemm_half_mn")),
    Stage(_GEMMS, ("gemm_share_fp8",), narrow=True),
    Stage(
        _ATTENTION,
        (
            *("attention_forward_share", "attention_backward_share"),
            *("attention_half_length", "attention_half_width"),
        ),
    ),
    Stage(("elementwise",), ("eager_traffic_factor",)),
    Stage(("block",), ("launch_s",)),
    Stage(
        _TRAFFIC,
        (
            *("fabric_bus_share", "fabric_half_message_bytes", "fabric_latency_s", "fabric_hop_s"),
            *("network_share", "network_half_message_bytes", "network_latency_s"),
        ),
    ),
    Stage(("optimizer",), ("optimizer_traffic_share",)),
    Stage(("cpu optimizer",), ("cpu_adam_bytes_per_s",)),
)
SPREAD = 1.2
"""Standard deviation of the logarithm of a factor before anything was measured: a machine of the same name is rarely
ten times as fast."""


@dataclass(frozen=True)
class Question:
    """The machine that was measured, and the framework whose steps are to be predicted."""

    cluster: Cluster
    backend: Backend

    def pieces(self, factors: Mapping[str, float]) -> Pieces:
        return Pieces(self.cluster, self.backend, published_constants().with_factors(dict(factors)))

    @property
    def host_adds(self) -> bool:
        """Whether issuing work takes time beside the work itself, because one thread does both."""
        return self.cluster.accelerator.synchronous


@dataclass(frozen=True)
class Found:
    """Factors so far, and how much the measurements say about each."""

    factors: dict[str, float]
    determined: dict[str, float]
    held: tuple[str, ...] = ()
    """Constants at the edge of what a profile can hold."""


def calibration(
    question: Question,
    measurements: Sequence[MachineMeasurement],
    *,
    device_name: str,
    host: str,
    versions: Mapping[str, str],
    processes: int,
    not_measured: Mapping[str, str] | None = None,
    runs: Sequence[TrainingRun] = (),
) -> MachineCalibration:
    """The profile that the measurements and the training ``runs`` support, each beside what the cost model says before
    and after."""
    found = with_runs(question, fit(question, measurements), runs)
    rows = _beside(question, measurements, found.factors)
    profile = Profile(
        planner_version=__version__,
        created=datetime.date.today().isoformat(),
        accelerator=question.cluster.accelerator.id,
        framework=question.backend.name,
        factors=found.factors,
        fitted=tuple(_factor(name, value, found.determined[name]) for name, value in found.factors.items()),
        runs=compared(question.cluster, question.backend, runs, found.factors),
        measurements=rows,
        versions=dict(versions),
        processes=processes,
    )
    residuals = residuals_of(rows)
    return MachineCalibration(
        profile=profile,
        device_name=device_name,
        host=host,
        residuals=residuals,
        not_measured=dict(not_measured or {}),
        warnings=(*_warnings(question, found, rows, residuals),),
    )


def fit(question: Question, measurements: Sequence[MachineMeasurement]) -> Found:
    """Factor of every constant that the measurements determine."""
    found = Found({}, {})
    overhead = issue_times(measurements)
    for stage in STAGES:
        rows = [row for row in measurements if row.kind in stage.kinds and not row.smallest]
        rows = _gathered_and_scattered([row for row in rows if (row.precision == "fp8") is stage.narrow])
        if rows:
            found = _after(question, stage, rows, found, overhead)
    return found


def with_runs(question: Question, found: Found, runs: Sequence[TrainingRun]) -> Found:
    """What is known with training runs; of what small measurements determine, these still say most."""
    if not runs:
        return found
    hosts = fit_hosts(question.cluster, question.backend, runs, found.factors)
    held = [name for name, value in hosts.factors.items() if value in (LEAST_FACTOR, MOST_FACTOR)]
    return Found(
        found.factors | hosts.factors,
        hosts.determined | found.determined,
        tuple(dict.fromkeys([*found.held, *held])),
    )


def _gathered_and_scattered(rows: Sequence[MachineMeasurement]) -> list[MachineMeasurement]:
    """The rows with gather and scatter of one size as one row: the cost model gives them one time, training does as
    many of the one as of the other, so their mean is what has to be right."""
    twins: dict[str, list[MachineMeasurement]] = defaultdict(list)
    for row in rows:
        kind = "all-gather" if row.kind == "reduce-scatter" else row.kind
        twins[f"{kind} {row.label}"].append(row)
    return [
        same[0].model_copy(update={"seconds": statistics.fmean(row.seconds for row in same)}) for same in twins.values()
    ]


def issue_times(measurements: Sequence[MachineMeasurement]) -> dict[BenchmarkKind, float]:
    """Seconds that it takes to issue one execution, by kind: the time of its smallest benchmark."""
    overhead: dict[BenchmarkKind, float] = {}
    for kinds in _ISSUED:
        smallest = [row.seconds for row in measurements if row.kind in kinds and row.smallest]
        overhead |= dict.fromkeys(kinds, min(smallest, default=0.0))
    return overhead


def predicted_s(
    question: Question, pieces: Pieces, row: MachineMeasurement, overhead: Mapping[BenchmarkKind, float]
) -> float:
    """What the cost model says of a measurement, and what issuing it takes where nothing hides that."""
    issued, work = overhead.get(row.kind, 0.0), pieces.seconds(row)
    return issued + work if question.host_adds else max(issued, work)


def _after(
    question: Question,
    stage: Stage,
    rows: Sequence[MachineMeasurement],
    found: Found,
    overhead: Mapping[BenchmarkKind, float],
) -> Found:
    """What is known with one more stage."""
    names = stage.constants
    measured = np.log([row.seconds for row in rows])

    def errors_at(logs: FloatArray) -> FloatArray:
        pieces = question.pieces(found.factors | dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.asarray(np.log([predicted_s(question, pieces, row, overhead) for row in rows]) - measured)

    zeros = np.zeros(len(names))
    minimum = minimise(errors_at, zeros, zeros, np.full(len(names), SPREAD), np.ones(len(rows)), iterations=30)
    kept = dict(zip(names, minimum.determined.tolist(), strict=True))
    values = dict(zip(names, np.exp(minimum.logs).tolist(), strict=True))
    factors, determined, held = dict(found.factors), dict(found.determined), list(found.held)
    for name in names:
        if kept[name] < _UNDETERMINED:
            continue
        factors[name] = _rounded(min(max(values[name], LEAST_FACTOR), MOST_FACTOR))
        determined[name] = round(kept[name], 3)
        if not LEAST_FACTOR < values[name] < MOST_FACTOR:
            held.append(name)
    return Found(factors, determined, tuple(held))


def _beside(
    question: Question, measurements: Sequence[MachineMeasurement], factors: Mapping[str, float]
) -> tuple[MachineMeasurement, ...]:
    """The measurements with what the model says of them; the smallest only show what issuing them takes."""
    overhead = issue_times(measurements)
    before, after = question.pieces({}), question.pieces(factors)
    rows = []
    for row in measurements:
        if not row.smallest:
            row = row.model_copy(
                update={
                    "published_s": _rounded(predicted_s(question, before, row, overhead)),
                    "fitted_s": _rounded(predicted_s(question, after, row, overhead)),
                }
            )
        rows.append(row)
    return tuple(rows)


def residuals_of(rows: Sequence[MachineMeasurement]) -> dict[str, float]:
    """By kind, the median of |predicted / measured - 1| with the profile."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.fitted_s is not None:
            errors[row.kind].append(abs(row.fitted_s / row.seconds - 1.0))
    return {kind: round(statistics.median(found), 4) for kind, found in errors.items()}


def _factor(name: str, value: float, determined: float) -> CalibratedFactor:
    return CalibratedFactor(
        name=name, meaning=meaning_of(name)[1], factor=value, low=LEAST_FACTOR, high=MOST_FACTOR, determined=determined
    )


def _warnings(
    question: Question, found: Found, rows: Sequence[MachineMeasurement], residuals: Mapping[str, float]
) -> list[str]:
    lines = [
        f"{name}: the machine is further from the published value than a profile can say (x {LEAST_FACTOR:g} to "
        f"{MOST_FACTOR:g}); is it a {question.cluster.accelerator.id}?"
        for name in found.held
    ]
    constants = published_constants().lookup(question.backend.name, question.cluster.accelerator)
    for name in _shares():
        value = getattr(constants, name) * found.factors.get(name, 1.0)
        # The catalogue's figures of a processor stand for any processor.
        if name in found.factors and value > 1.0 and not question.host_adds:
            lines.append(f"{name} becomes {value:.2f} of what the catalogue says the hardware can do")
    lines += [
        f"{kind}: the cost model is {percent(error)} off what was measured even with the profile (median)"
        for kind, error in residuals.items()
        if error > _LARGE_RESIDUAL
    ]
    noisy = [row for row in rows if row.spread > _NOISY]
    if noisy:
        lines.append(
            f"{len(noisy)} of {len(rows)} measurements vary by more than {percent(_NOISY)}: other programs may be "
            "using the machine"
        )
    return lines


def _shares() -> tuple[str, ...]:
    """Constants that are shares of a figure of the hardware."""
    names = (name for stage in STAGES for name in stage.constants)
    return tuple(name for name in names if name.endswith("_share") and name in Constants.__dataclass_fields__)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
