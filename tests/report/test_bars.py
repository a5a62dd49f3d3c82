"""Stage memory and the waterfall: sums are kept, stages that look alike are one, every part of a step has its kind."""

from __future__ import annotations

import re

import pytest

from planner.backends import BACKENDS
from planner.cost.context import CostContext
from planner.cost.estimate import estimate
from planner.report.described import stages_figure, time_figure
from planner.report.figures import pictures
from planner.report.figures.bars import stages, waterfall
from planner.service.parts import MEMORY_TERMS, part_kind, seconds_by_kind, time_parts
from planner.service.profiles import context_of
from planner.service.why import largest_loss, where_time_goes
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.plan import Breakdown, Plan
from tests.random_plans import random_plans
from tests.report.documents import CASES
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
    """Below half a percent of the step; of no kind, for they are of several."""
    found = plan(question("llama-3-70b", machines(gpus=64), global_batch=256), tp=8, pp=8)
    parts = waterfall(found)
    small = {name for name, value in time_parts(found).items() if value < 0.005 * found.estimate.step_time_s}
    assert small
    assert small.isdisjoint(part.name for part in parts)
    assert (parts[-1].name, parts[-1].kind) == ("other", "mixed")


@pytest.mark.parametrize("name", CASES)
def test_the_caption_and_the_reasons_say_the_same_of_a_step(name: str) -> None:
    """Both count every part of the step, the small ones too: what they name adds up to the whole step."""
    document = CASES[name]()
    drawn = pictures(document)
    assert sum(drawn.kinds.values()) == pytest.approx(document.best.estimate.step_time_s)
    shares = [float(share) for share in re.findall(r"(-?[\d.]+) %", time_figure(drawn).caption)]
    assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares))
    why = document.best.why[0] if document.best.why else ""
    if "of the step" in why:
        named = [float(share) for share in re.findall(r"(-?[\d.]+) %", why)]
        assert sum(named) == pytest.approx(100.0, abs=0.05 * len(named) + 0.2)
        assert named[0] == shares[0]


def test_waits_of_routing_are_a_loss() -> None:
    """They and all that is not the model's arithmetic count by their size, in the sentence and in the table."""
    whole = plan(question())
    times = {"mlp matrices": 6.0, "routing waits": 2.0, "recomputation": 1.0, "logits traffic": 0.5, "optimizer": 0.5}
    leaves = tuple(Breakdown(name=name, value=value) for name, value in times.items())
    tree = Breakdown(name="step time", value=10.0, combine="sum", children=leaves)
    estimate = whole.estimate.model_copy(update={"time": tree, "step_time_s": 10.0})
    found = whole.model_copy(update={"estimate": estimate})
    assert seconds_by_kind(found)["arithmetic"] == 6.0
    assert largest_loss(found) == ("routing waits", 0.2)
    assert where_time_goes(found) == (
        "60.0 % of the step is the model's arithmetic, routing waits 20.0 %, recomputation 10.0 %, "
        "logits traffic 5.0 %, optimizer 5.0 %"
    )


def test_a_term_keeps_its_letter_and_colour() -> None:
    """Whatever other terms a plan has, the legend has each at its own place."""
    seen: dict[str, set[tuple[str, str]]] = {}
    names = [term.name for term in MEMORY_TERMS]
    for case in CASES.values():
        marks = stages_figure(pictures(case())).legend
        places = [names.index(mark.label) for mark in marks]
        assert places == sorted(places)
        for mark in marks:
            seen.setdefault(mark.label, set()).add((mark.letter, mark.style))
    assert all(len(found) == 1 for found in seen.values())
    assert seen["optimizer"] == {("O", "c3")}


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
