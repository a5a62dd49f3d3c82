"""The engine against the oracle: on small problems the proven optimum must be the enumerated one, for every backend."""

from __future__ import annotations

import pytest

from planner.backends import BACKENDS
from planner.backends.base import RuleContext
from planner.cost.evaluate import CostContext, evaluate
from planner.errors import InputError
from planner.search.engine import search
from planner.search.exhaustive import exhaustive_optimum
from planner.specs.batch import StrategyBatch
from planner.specs.job import Objective
from tests.contract.search_problems import problem

PROBLEMS = 200
BATCHES = 20


def broken(context: CostContext, plan: StrategyBatch) -> list[str]:
    """Rules of the backend that a complete plan breaks."""
    rules = RuleContext(context.model, context.cluster, context.job, plan, context.recompute_kinds)
    return [rule.id for rule, mask in context.backend.broken_rules(rules) if mask.any()]


def check(backend: str, seed: int, objective: Objective) -> str:
    """Compare one problem; returns the status for the statistics."""
    question = problem(BACKENDS[backend], seed, objective)
    try:
        expected = exhaustive_optimum(question)
    except InputError:
        with pytest.raises(InputError):
            search(question)
        return "refused"
    outcome = search(question, explain=False)
    if expected is None:
        assert outcome.status == "infeasible", seed
        return "infeasible"
    assert outcome.status == "optimal", seed
    assert outcome.best is not None, seed
    prices = evaluate(question.context, outcome.best)
    assert prices.fits[0], seed
    time_s, memory, _ = expected
    if objective == "memory":
        assert float(prices.peak_memory_bytes[0]) == pytest.approx(memory, rel=1e-6), seed
    else:
        assert float(prices.step_time_s[0]) == pytest.approx(time_s, rel=1e-6), seed
    for plan in (outcome.best, *outcome.alternatives):
        assert evaluate(question.context, plan).fits[0], seed
        assert not broken(question.context, plan), seed
    return "optimal"


@pytest.mark.parametrize("part", range(BATCHES))
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_engine_equals_enumeration(backend: str, part: int) -> None:
    """Step time of the best plan, over dense, mixture and window models with ample, tight and too little memory."""
    count = PROBLEMS // BATCHES
    seen = [check(backend, part * count + index, "throughput") for index in range(count)]
    assert "optimal" in seen


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_least_memory_equals_enumeration(backend: str) -> None:
    """The objective memory finds the smallest peak that any strategy has."""
    seen = {check(backend, 1000 + index, "memory") for index in range(15)}
    assert "optimal" in seen
