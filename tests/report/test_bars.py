"""Stage memory and the waterfall: sums are kept, stages that look alike are one, every part of a step has its kind."""

from __future__ import annotations

import pytest

from planner.backends import BACKENDS
from planner.cost.context import CostContext
from planner.cost.estimate import estimate
from planner.report.figures.bars import stages, waterfall
from planner.service.parts import part_kind
from planner.service.profiles import context_of
from planner.service.why import time_parts
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.plan import Breakdown, Plan
from tests.random_plans import random_plans
from tests.strategies import machines, question, strategy

ARITHMETIC = {
    *("attention projections", "mixer projections", "mlp matrices", "expert matrices", "router", "adapters"),
    *("core attention", "mixer elementwise", "norms", "rotary", "activation function", "expert permutation"),
    *("fp8 casts", "gradient accumulation", "recomputation", "embedding", "output head", "loss", "prediction blocks"),
}


def plan(context: CostContext, **columns: object) -> Plan:
    batch = strategy(context, **columns)  # type: ignore[arg-type]
    found = to_strategy(batch, 0, context.recompute_kinds, context.job)
    return Plan(backend=context.backend.name, strategy=found, estimate=estimate(context, batch))


def test_stages_that_look_alike_are_one() -> None:
    """Without micro-batches in flight to tell them apart (GPipe), all stages but the ends are alike."""
    context = question("llama-3-70b", machines(gpus=64), "nanotron", global_batch=16)
    rows = stages(plan(context, tp=8, pp=8, schedule="gpipe", stage_layers=(10,) * 8).estimate)
    assert [(row.first_stage, row.last_stage) for row in rows] == [(0, 0), (1, 6), (7, 7)]


def test_stages_of_many_kinds_are_all_there() -> None:
    """1F1B keeps fewer micro-batches alive on every later rank: no two stages are alike."""
    context = question("llama-3-70b", machines(gpus=128), global_batch=64)
    rows = stages(plan(context, tp=8, pp=16).estimate)
    assert [(row.first_stage, row.last_stage) for row in rows] == [(stage, stage) for stage in range(16)]


def test_weights_gathered_from_their_shards_are_weights() -> None:
    """ZeRO-2 that keeps its gathered weights does not hide them in the overhead."""
    context = question("llama-3-8b", machines(gpus=8), "fsdp")
    terms = {term.name: term.value for term in stages(plan(context, zero_stage=2).estimate)[0].terms}
    assert terms["weights"] >= 2 * 8.0e9
    assert terms["overhead"] < 4e9


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_part_has_a_kind_of_its_own_meaning(backend: str) -> None:
    """What is called arithmetic in random plans is arithmetic; all other names are told apart."""
    for document in random_plans(backend, 20, seed=9):
        context = context_of(document.request, backend)
        found = estimate(context, from_strategy(document.best.strategy, context.recompute_kinds))
        names = time_parts(document.best.model_copy(update={"estimate": found}))
        assert {name for name in names if part_kind(name) == "arithmetic"} <= ARITHMETIC


def test_small_parts_are_one_bar_at_the_end() -> None:
    """Below half a percent of the step; of the kind that most of them are."""
    found = plan(question("llama-3-70b", machines(gpus=64), global_batch=256), tp=8, pp=8)
    parts = waterfall(found)
    small = {name for name, value in time_parts(found).items() if value < 0.005 * found.estimate.step_time_s}
    assert small
    assert small.isdisjoint(part.name for part in parts)
    assert (parts[-1].name, parts[-1].kind) == ("other", "arithmetic")


def test_a_step_shorter_than_its_slowest_stage() -> None:
    """Ranks that wait leave their cores to the slowest: a negative part that the bars behind it start from."""
    tree = Breakdown(
        name="step time",
        value=8.0,
        combine="sum",
        children=(
            Breakdown(name="mlp matrices", value=10.0),
            Breakdown(name="cores of waiting stages", value=-3.0),
            Breakdown(name="optimizer", value=1.0),
        ),
    )
    whole = plan(question())
    found = waterfall(whole.model_copy(update={"estimate": whole.estimate.model_copy(update={"time": tree})}))
    assert [(part.kind, part.start_s, part.seconds) for part in found] == [
        ("arithmetic", 0.0, 10.0),
        ("waiting", 10.0, -3.0),
        ("update", 7.0, 1.0),
    ]
