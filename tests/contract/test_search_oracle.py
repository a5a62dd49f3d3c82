"""The engine against the oracle: on small problems the proven optimum must be the enumerated one, for every backend."""

from __future__ import annotations

import pytest

from planner.backends import BACKENDS
from planner.cost.evaluate import evaluate
from planner.errors import InputError
from planner.search.engine import search
from planner.search.exhaustive import exhaustive_optimum
from tests.contract.search_problems import problem

PROBLEMS = 200
BATCHES = 20
SOLVED = []


def check(backend: str, seed: int, objective: str) -> str:
    """Compare one problem; returns the status for the statistics."""
    question = problem(BACKENDS[backend], seed, objective)
    try:
        expected = exhaustive_optimum(question)
    except InputError:
        with pytest.raises(InputError):
            search(question)
        return "refused"
    outcome = search(question, explain=False)
    SOLVED.append(outcome.solved)
    if expected is None:
        assert outcome.status == "infeasible", seed
        return "infeasible"
    assert outcome.status == "optimal" and outcome.best is not None, seed
    prices = evaluate(question.context, outcome.best)
    assert prices.fits[0], seed
    time_s, memory, _ = expected
    if objective == "memory":
        assert float(prices.peak_memory_bytes[0]) == pytest.approx(memory, rel=1e-6), seed
    else:
        assert float(prices.step_time_s[0]) == pytest.approx(time_s, rel=1e-6), seed
    for alternative in outcome.alternatives:
        assert evaluate(question.context, alternative).fits[0], seed
    return "optimal"


@pytest.mark.parametrize("part", range(BATCHES))
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_engine_equals_enumeration(backend: str, part: int) -> None:
    """Step time of the best plan, over dense, mixture and window models with ample, tight and too little memory."""
    count = PROBLEMS // BATCHES
    seen = [check(backend, part * count + index, "throughput") for index in range(count)]
    assert len(seen) == count and "optimal" in seen


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_least_memory_equals_enumeration(backend: str) -> None:
    """The objective memory finds the smallest peak that any strategy has."""
    seen = {check(backend, 1000 + index, "memory") for index in range(15)}
    assert "optimal" in seen
