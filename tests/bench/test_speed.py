"""Whole-process times as ratios to importing the solver, evaluation rate, peak memory: figures of one run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest

from planner.backends import get_backend
from planner.catalog import load_model
from planner.cost.evaluate import CostContext, evaluate
from planner.search.space import enumerate_space
from planner.specs.batch import StrategyBatch
from planner.specs.job import Job
from planner.units import MIB
from tests.reference.cases import reference_cluster

pytestmark = pytest.mark.bench
RUNS = 5
BASELINE = [sys.executable, "-c", "from ortools.sat.python import cp_model"]


@dataclass(frozen=True)
class Process:
    """CPU seconds and peak memory of one finished process."""

    cpu_s: float
    peak_bytes: int


def _run(command: list[str]) -> Process:
    code = (
        "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "u = resource.getrusage(resource.RUSAGE_CHILDREN); print(u.ru_utime + u.ru_stime, u.ru_maxrss); "
        "sys.exit(r.returncode)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    ).stdout.split()
    return Process(float(out[0]), int(out[1]) * 1024)


def _planner(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "planner", "suggest", *arguments]


def test_accuracy_over_all_public_records() -> None:
    """The published comparison takes seconds, not a coffee: 30 s on two cores."""
    started = time.perf_counter()
    _run([sys.executable, "-m", "planner", "accuracy"])
    assert time.perf_counter() - started < 30.0


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        pytest.param(("--model", "70b", "--gpus", "128", "--gpu", "h100"), 2.5, id="70b-128"),
        pytest.param(("--model", "deepseek-v3", "--gpus", "2048", "--gpu", "h800"), 6.0, id="deepseek-v3-2048"),
        pytest.param(("--model", "405b", "--gpus", "16384", "--gpu", "h100"), 6.0, id="405b-16384"),
    ],
)
def test_cold_process(arguments: tuple[str, ...], budget: float) -> None:
    """A cold `planner suggest` costs at most the budget times a cold import of the solver, and stays under 500 MB."""
    pairs = [(_run(_planner(*arguments)), _run(BASELINE)) for _ in range(RUNS)]
    ratio = statistics.median(planner.cpu_s / baseline.cpu_s for planner, baseline in pairs)
    peak = max(planner.peak_bytes for planner, _ in pairs) / MIB
    print(f"\n{' '.join(arguments)}: {ratio:.2f} x the solver's import (budget {budget}), {peak:.0f} MiB peak")
    assert ratio <= budget
    assert peak < 500


def test_evaluation_rate() -> None:
    """At least 200,000 strategies a second are evaluated on one core, over a real mixture of shapes."""
    context = CostContext(
        load_model("llama-3-70b").spec,
        reference_cluster("h100-sxm-80gb", 128, 8),
        Job(seq_len=8192, global_batch=256),
        get_backend("megatron"),
    )
    batch = StrategyBatch.concatenate([group.batch for group in enumerate_space(context, {}).groups])
    rates = []
    for _ in range(RUNS):
        start = time.process_time()
        seconds = evaluate(context, batch).step_time_s
        rates.append(len(batch) / (time.process_time() - start))
        assert np.all(seconds > 0)
    print(f"\n{len(batch)} strategies, {statistics.median(rates):,.0f} a second")
    assert statistics.median(rates) >= 200_000
