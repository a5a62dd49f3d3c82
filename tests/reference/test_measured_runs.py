"""The cost model against published runs: each must come within its stated tolerance."""

from __future__ import annotations

import statistics

import pytest

from planner.cost.estimate import estimate
from planner.cost.evaluate import evaluate
from planner.specs.plan import Breakdown
from planner.units import GIB
from tests.reference.cases import MeasuredRun, measured_runs

RUNS = measured_runs()
TIMED = [run for run in RUNS if run.step_time_s is not None]
WEIGHED = [run for run in RUNS if run.allocated_gib is not None]
RESERVED = [run for run in RUNS if run.reserved_gib is not None]


FRAGMENTATION, OVERHEAD = "fragmentation", "context and communication buffers"


def _peak_bytes(run: MeasuredRun, *outside: str) -> float:
    """The memory tree's worst stage and phase without the named leaves."""

    def phase(node: Breakdown) -> float:
        return sum(child.value for child in node.children if child.name not in outside)

    tree = estimate(run.context, run.batch).memory
    return max(phase(part) for stage in tree.children for part in stage.children)


@pytest.mark.parametrize("run", TIMED, ids=lambda run: run.id)
def test_step_time(run: MeasuredRun) -> None:
    """The predicted step time is within the case's tolerance of the published one."""
    predicted = float(evaluate(run.context, run.batch).step_time_s[0])
    assert run.step_time_s is not None
    error = predicted / run.step_time_s - 1.0
    assert abs(error) <= run.tolerance, f"predicted {predicted:.3f} s, measured {run.step_time_s} s: {error:+.1%}"


@pytest.mark.parametrize("run", WEIGHED, ids=lambda run: run.id)
def test_allocated_memory(run: MeasuredRun) -> None:
    """The predicted allocator peak is within the case's tolerance of the measured one."""
    predicted = _peak_bytes(run, FRAGMENTATION, OVERHEAD) / GIB
    assert run.allocated_gib is not None
    error = predicted / run.allocated_gib - 1.0
    assert abs(error) <= run.memory_tolerance, f"{predicted:.2f} GiB, measured {run.allocated_gib} GiB: {error:+.1%}"


@pytest.mark.parametrize("run", RESERVED, ids=lambda run: run.id)
def test_reserved_memory(run: MeasuredRun) -> None:
    """The predicted reserved memory (fragmentation included, context not) is within tolerance of the measured one."""
    predicted = _peak_bytes(run, OVERHEAD) / GIB
    assert run.reserved_gib is not None
    error = predicted / run.reserved_gib - 1.0
    assert abs(error) <= run.memory_tolerance, f"{predicted:.2f} GiB, measured {run.reserved_gib} GiB: {error:+.1%}"


def test_no_bias_over_all_runs() -> None:
    """Over all runs the model is neither slow nor fast on average, and the typical error is small."""
    errors = [
        float(evaluate(run.context, run.batch).step_time_s[0]) / run.step_time_s - 1.0
        for run in TIMED
        if run.step_time_s
    ]
    assert abs(statistics.mean(errors)) < 0.03
    assert statistics.median(abs(error) for error in errors) < 0.05


def test_memory_agrees_for_dense_and_experts() -> None:
    """Both kinds of models are among the weighed runs, so neither memory path goes untested."""
    assert {run.context.model.moe is None for run in WEIGHED} == {True, False}
