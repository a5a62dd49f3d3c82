"""The second half of a machine's calibration: what short training runs say of the host, beside which nothing smaller
can be timed.

Rates stay as the small measurements found them; only times that software costs move, from where those measurements (or
the published values) put them."""

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

HOST_CONSTANTS: dict[str, float] = {
    "launch_s": 0.3,
    "step_overhead_s": 1.0,
    "tensor_parallel_launch_factor": 1.0,
    "sharding_launch_factor": 1.0,
    "stage_sync_s": 1.0,
    "moe_host_s": 1.0,
    "fabric_latency_s": 0.3,
}
"""What may move, and the standard deviation of its logarithm before the runs: small where small measurements have found
it already."""
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
    """Move the host's constants from ``factors`` to where the runs' step times come out."""
    names = list(HOST_CONSTANTS)
    measured = np.log([run.step_time_s for run in runs])

    def errors_at(logs: FloatArray) -> FloatArray:
        moved = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return np.asarray(np.log(step_times(cluster, backend, runs, {**factors, **moved})) - measured)

    prior = np.log([factors.get(name, 1.0) for name in names])
    spread = np.array([HOST_CONSTANTS[name] for name in names])
    found = minimise(errors_at, prior, prior, spread, np.ones(len(runs)))
    kept = [index for index in range(len(names)) if found.determined[index] >= UNDETERMINED]
    values = {names[index]: math.exp(float(found.logs[index])) for index in kept}
    return Hosts(
        {name: float(f"{min(max(value, LEAST_FACTOR), MOST_FACTOR):.5g}") for name, value in values.items()},
        {names[index]: round(float(found.determined[index]), 3) for index in kept},
    )


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
