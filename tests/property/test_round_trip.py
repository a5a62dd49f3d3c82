"""Plan -> files -> configuration -> the same strategy at the same price, for every backend over its whole space."""

from __future__ import annotations

import itertools

import pytest

from planner.backends import BACKENDS
from planner.cost.context import CostContext
from planner.cost.estimate import estimate
from planner.reading import read_configuration
from planner.service.completion import complete
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.plan import Estimate, PlanDocument
from planner.specs.strategy import Strategy
from tests.random_plans import configuration_files, corner_plans, random_plans

RANDOM_PLANS = 120
CORNER_PLANS = 150


def read_back(document: PlanDocument) -> tuple[Strategy, Estimate]:
    """The strategy that the plan's files say and its estimate, with the model and the machines of the plan."""
    read = read_configuration(configuration_files(document))
    assert read.backend == document.best.backend
    assert not [finding for finding in read.findings if finding.severity == "error"], read.findings
    request = document.request
    job = request.job.model_copy(
        update={
            "seq_len": read.seq_len or request.job.seq_len,
            "precision": read.precision or request.job.precision,
            "global_batch": read.global_batch or request.job.global_batch,
        }
    )
    completed = complete(read, request.model, request.cluster, job)
    assert not completed.findings, completed.findings
    assert completed.batch is not None
    kinds = completed.backend.recompute_kinds(request.model, completed.job)
    strategy = to_strategy(completed.batch, 0, kinds, completed.job)
    context = CostContext(request.model, request.cluster, completed.job, completed.backend)
    return strategy, estimate(context, completed.batch)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_plan_is_read_back(backend: str) -> None:
    """Random plans and every value of every coarse column."""
    corners = list(corner_plans(backend))
    thinned = corners[:: max(1, len(corners) // CORNER_PLANS)]
    for document in itertools.chain(random_plans(backend, RANDOM_PLANS), thinned):
        strategy, price = read_back(document)
        assert strategy == document.best.strategy
        request = document.request
        planned = CostContext(request.model, request.cluster, request.job, BACKENDS[backend])
        assert price == estimate(planned, from_strategy(strategy, planned.recompute_kinds))
