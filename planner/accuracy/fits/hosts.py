"""The second half of a machine's calibration: what short training runs say that small measurements cannot.

Above all what software costs the host with every kind of parallelism; and whether the rates of all kernels, whose
proportions stay as the small measurements found them, are those of a whole step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.accuracy.fits.fitting import minimise
from planner.backends.base import Backend
from planner.cost.constants import published_constants
from planner.cost.context import CostContext
from planner.cost.evaluate import evaluate
from planner.specs.batch import FloatArray
from planner.specs.cluster import Cluster
from planner.specs.convert import from_strategy
from planner.specs.profile import LEAST_FACTOR, MOST_FACTOR, ProfileRun
from planner.specs.validation import RunConfig


@dataclass(frozen=True)
class Knob:
    """Constants that move together."""

    constants: tuple[str, ...]
    spread: float
    """Standard deviation of the logarithm of their common factor before the runs: small where small measurements have
    found it already."""


_RATES = ("gemm_share", "gemm_share_fp8", "attention_forward_share", "attention_backward_share", "stream_share")
_LATENCIES = ("fabric_latency_s", "fabric_hop_s")
KNOBS = (
    Knob(_RATES, 0.2),
    Knob(("launch_s",), 0.4),
    Knob(("step_overhead_s",), 1.0),
    Knob(("tensor_parallel_launch_factor",), 1.0),
    Knob(("sharding_launch_factor",), 1.0),
    Knob(("stage_sync_s",), 1.0),
    Knob(("moe_host_s",), 1.0),
    Knob(_LATENCIES, 0.3),
)
UNDETERMINED = 0.05


@dataclass(frozen=True)
class TrainingRun:
    """A short training run and the median of its slowest rank's steps."""

    config: RunConfig
    step_time_s: float

    @property
    def title(self) -> str:
        """``larger, tp 2, dp 2``."""
        strategy = self.config.strategy
        degrees = {"tp": strategy.tp, "pp": strategy.pp, "ep": strategy.ep, "dp": strategy.dp}
        words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        words += [f"sharding stage {strategy.zero_stage}"] if strategy.zero_stage else []
        return ", ".join([self.config.model.name, *(words or ["1 process"])])


@dataclass(frozen=True)
class Hosts:
    """Factors that the runs ask for, by constant, and how much they say about each."""

    factors: dict[str, float]
    determined: dict[str, float]


def step_times(
    cluster: Cluster, backend: Backend, runs: Sequence[TrainingRun], factors: Mapping[str, float]
) -> FloatArray:
    """(runs,) seconds of a step by the cost model that prices plans."""
    table = published_constants().with_factors(dict(factors))
    seconds = []
    for run in runs:
        config = run.config
        context = CostContext(config.model, cluster, config.job, backend, table)
        batch = from_strategy(config.strategy, context.recompute_kinds)
        seconds.append(float(evaluate(context, batch).step_time_s[0]))
    return np.array(seconds)


def fit_hosts(cluster: Cluster, backend: Backend, runs: Sequence[TrainingRun], factors: Mapping[str, float]) -> Hosts:
    """Move the knobs from ``factors`` to where the runs' step times come out."""
    measured = np.log([run.step_time_s for run in runs])

    def moved(logs: FloatArray) -> dict[str, float]:
        return {
            name: factors.get(name, 1.0) * math.exp(float(log))
            for knob, log in zip(KNOBS, logs, strict=True)
            for name in knob.constants
        }

    def errors_at(logs: FloatArray) -> FloatArray:
        return np.asarray(np.log(step_times(cluster, backend, runs, {**factors, **moved(logs)})) - measured)

    zeros = np.zeros(len(KNOBS))
    found = minimise(errors_at, zeros, zeros, np.array([knob.spread for knob in KNOBS]), np.ones(len(runs)))
    values, told = moved(found.logs), dict[str, float]()
    for knob, share in zip(KNOBS, found.determined.tolist(), strict=True):
        # A knob that turns a constant of zero, or of other machines, says nothing.
        told |= dict.fromkeys(knob.constants, round(share, 3)) if share >= UNDETERMINED else {}
    told = {name: share for name, share in told.items() if name in factors or name not in _MEASURED}
    return Hosts({name: float(f"{min(max(values[name], LEAST_FACTOR), MOST_FACTOR):.5g}") for name in told}, told)


_MEASURED = frozenset((*_RATES, *_LATENCIES))
"""Constants that small measurements determine; what they left alone stays alone."""


def compared(
    cluster: Cluster, backend: Backend, runs: Sequence[TrainingRun], factors: Mapping[str, float]
) -> tuple[ProfileRun, ...]:
    """Every run with the error of its predicted step time by the published constants and by ``factors``."""
    before, after = step_times(cluster, backend, runs, {}), step_times(cluster, backend, runs, factors)
    return tuple(
        ProfileRun(
            id=run.title,
            measured_step_time_s=run.step_time_s,
            error_before=round(float(before[index]) / run.step_time_s - 1.0, 4),
            error_after=round(float(after[index]) / run.step_time_s - 1.0, 4),
        )
        for index, run in enumerate(runs)
    )
