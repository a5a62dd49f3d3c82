"""The engine against the oracle: on small problems the proven optimum must be the enumerated one, for every
backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.backends import BACKENDS
from planner.backends.base import RuleContext
from planner.catalog import load_model
from planner.cost.evaluate import CostContext, evaluate
from planner.errors import InputError
from planner.search.engine import search
from planner.search.exhaustive import exhaustive_optimum
from planner.search.problem import Problem
from planner.specs.batch import StrategyBatch
from planner.specs.job import Job, Objective
from tests.contract.search_problems import problem
from tests.reference.cases import reference_cluster

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


def test_shared_cores_equal_enumeration() -> None:
    """Ranks that take turns on cores, where a stage's length can count for nothing."""
    for seed in range(20):
        asked = problem(BACKENDS["pytorch"], seed)
        device = asked.context.cluster.accelerator.model_copy(update={"synchronous": True})
        cluster = asked.context.cluster.model_copy(update={"accelerator": device, "host_cores_per_node": 2})
        question = replace(asked, context=replace(asked.context, cluster=cluster))
        expected, outcome = exhaustive_optimum(question), search(question, explain=False)
        if expected is None or outcome.best is None:
            assert expected is None, seed
            assert outcome.best is None, seed
            continue
        found = float(evaluate(question.context, outcome.best).step_time_s[0])
        assert found == pytest.approx(expected[0], rel=1e-6), seed


@pytest.mark.parametrize(
    ("model", "gpus"), [("llama-2-7b", 4), ("llama-3.1-8b", 4)], ids=["llama-2-7b", "llama-3.1-8b"]
)
def test_tight_cards_with_offload_end_in_a_proof(model: str, gpus: int) -> None:
    """Layers, recomputed layers and offload steps open at once under tight memory: once an endless solve, then an
    abort."""
    context = CostContext(
        load_model(model).spec,
        reference_cluster("rtx-4090", gpus, 8),
        Job(seq_len=4096, global_batch=256),
        BACKENDS["megatron"],
    )
    outcome = search(Problem(context, {}), explain=False)
    assert outcome.status == "optimal"
    assert outcome.best is not None
    assert evaluate(context, outcome.best).fits[0]
    assert float(outcome.best.offload_optimizer[0]) > 0
