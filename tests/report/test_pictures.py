"""Everything drawn of a plan document, for every framework, from one GPU to sixteen thousand, fitting or not."""

from __future__ import annotations

import itertools

import pytest

from planner.backends import BACKENDS
from planner.cost.context import Work
from planner.cost.estimate import estimate as priced
from planner.cost.step import Step
from planner.report.figures import pictures
from planner.service import ClusterInput, JobInput, PlanRequest, StrategyInput, estimate, suggest
from planner.service.profiles import context_of
from planner.specs.convert import from_strategy
from planner.specs.pictures import Pictures
from planner.specs.plan import Breakdown, Plan, PlanDocument
from tests.random_plans import random_plans

JOB = JobInput(seq_len=4096, global_batch=256)


def with_estimate(document: PlanDocument) -> PlanDocument:
    """A random plan with the cost model's figures in place of round ones."""
    context = context_of(document.request, document.best.backend)
    found = priced(context, from_strategy(document.best.strategy, context.recompute_kinds))
    return document.model_copy(update={"best": document.best.model_copy(update={"estimate": found})})


def check(document: PlanDocument, plan: Plan, drawn: Pictures) -> None:
    """What holds for the pictures of any plan."""
    assert Pictures.model_validate_json(drawn.model_dump_json()) == drawn
    assert drawn.memory_limit_bytes == plan.estimate.memory_limit_bytes
    assert drawn.points[0].step_time_s == document.best.estimate.step_time_s
    _check_stages(plan, drawn)
    _check_time(plan, drawn)
    _check_schedule(plan, drawn)
    _check_places(document, plan, drawn)


def _check_stages(plan: Plan, drawn: Pictures) -> None:
    stages = [stage for row in drawn.stages for stage in range(row.first_stage, row.last_stage + 1)]
    assert stages == list(range(plan.strategy.pp))
    for row in drawn.stages:
        assert sum(term.value for term in row.terms) == pytest.approx(row.total_bytes)
        assert all(term.value >= -1e-6 * row.total_bytes for term in row.terms)
    worst = max(row.total_bytes for row in drawn.stages)
    assert worst == pytest.approx(plan.estimate.peak_memory_bytes, rel=0.006)


def _check_time(plan: Plan, drawn: Pictures) -> None:
    step = plan.estimate.step_time_s
    ends = [part.start_s + part.seconds for part in drawn.time]
    assert [part.start_s for part in drawn.time] == pytest.approx([0.0, *ends[:-1]])
    assert ends[-1] == pytest.approx(step, rel=0.0011)
    assert len({part.name for part in drawn.time}) == len(drawn.time)


def _check_schedule(plan: Plan, drawn: Pictures) -> None:
    strategy, schedule = plan.strategy, drawn.schedule
    assert (schedule is None) == (strategy.pp == 1)
    if schedule is None:
        return
    assert schedule.micro_batches == strategy.grad_accum >= schedule.shown_micro_batches >= 1
    assert 0.0 < schedule.busy_share <= 1.0 + 1e-9
    kinds = 3 if schedule.name.startswith("zb") else 2
    assert len(schedule.slots) == kinds * schedule.shown_micro_batches * strategy.pp * strategy.vpp
    assert len(schedule.slots) <= 3072 or schedule.shown_micro_batches == 1
    for _, slots in itertools.groupby(schedule.slots, key=lambda slot: slot.stage):
        row = list(slots)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(row))
        phases = [phase for phase, _ in itertools.groupby(slot.phase for slot in row)]
        assert phases in (
            ["warm-up", "steady", "cool-down"],
            ["warm-up", "cool-down"],
            ["steady", "cool-down"],
            ["steady"],
        )
    assert pipeline_s(plan.estimate.time) == pytest.approx(schedule.simulated_s, rel=0.10)


def pipeline_s(tree: Breakdown) -> float:
    """What the estimate says of the same time: the slowest stage for all micro-batches, and fill and drain."""
    names = ("pipeline bubble", "cores of waiting stages")
    return sum(part.value for part in tree.children if " x " in part.name or part.name in names)


def _check_places(document: PlanDocument, drawn_plan: Plan, drawn: Pictures) -> None:
    cluster, places = document.request.cluster, drawn.topology
    assert places.nodes == cluster.nodes
    assert [place.rank for place in places.ranks] == sorted({place.rank for place in places.ranks})
    assert {place.node for place in places.ranks} == set(places.shown_nodes)
    data = "dp x cp" if drawn_plan.strategy.cp > 1 else "dp"
    assert {row.axis for row in places.traffic} <= {"tp", "cp", "ep", "pp", data}
    _check_groups(document, drawn_plan, drawn)
    total = sum(row.exposed_s for row in places.traffic)
    shown = sum(part.seconds for part in drawn.time if part.kind == "communication" and part.name != "other")
    assert total >= shown - 1e-9


def _check_groups(document: PlanDocument, plan: Plan, drawn: Pictures) -> None:
    """The groups of the map are those that the cost model prices: sizes and distances."""
    context = context_of(document.request, plan.backend)
    priced_groups = Step(Work(context, from_strategy(plan.strategy, context.recompute_kinds)), plan.strategy.pp).groups
    shown = {axis.name: (axis.size, axis.stride) for axis in drawn.topology.axes}
    s, cost = plan.strategy, priced_groups
    expected = {"tp": cost.tensor, "cp": cost.context, "sp": cost.context, "pp": cost.pipeline}
    expected |= {"ep": cost.expert, "etp": cost.expert_tensor, "edp": cost.expert_data}
    whole = "dp x cp" if "cp" in shown else "dp x sp" if "sp" in shown else "dp"
    expected |= {whole: cost.data, "efsdp": cost.expert_shard}
    expected["dp_shard x cp" if s.cp > 1 else "dp_shard"] = cost.shard
    for name in shown.keys() & expected.keys():
        assert shown[name] == (expected[name].size[0], expected[name].stride[0]), name
    if cost.data.size[0] > 1:
        assert shown.keys() & {whole, "dp_shard", "dp_shard x cp", "dp_replicate", "dp_replicate x cp"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_plans_of_every_framework(backend: str) -> None:
    for document in random_plans(backend, 15, seed=11):
        priced_document = with_estimate(document)
        check(priced_document, priced_document.best, pictures(priced_document))


@pytest.mark.parametrize(
    ("model", "gpus", "strategy"),
    [
        ("llama-3.2-1b", 1, StrategyInput()),
        ("llama-3.1-70b", 1, StrategyInput()),
        ("llama-3.1-70b", 16384, StrategyInput(tp=8, pp=16, vpp=5)),
        ("llama-3.1-405b", 16384, StrategyInput(tp=8, pp=16, cp=2)),
        ("mixtral-8x7b", 64, StrategyInput(tp=2, pp=4, ep=8)),
        ("deepseek-v3", 1024, StrategyInput(pp=16, ep=64)),
        ("gpt3-175b", 96, StrategyInput(tp=2, pp=16, vpp=6)),
    ],
)
def test_extreme_estimates(model: str, gpus: int, strategy: StrategyInput) -> None:
    """Given strategies from one GPU, on which nothing large fits, to sixteen thousand."""
    job = JobInput(seq_len=2048, global_batch=48 if gpus == 96 else max(256, 2 * gpus))
    document = estimate(model, ClusterInput(gpu="h100", gpus=gpus), job, strategy)
    drawn = pictures(document)
    check(document, document.best, drawn)
    assert [point.on_frontier for point in drawn.points] == [True]
    assert len(drawn.topology.shown_nodes) <= 16


def test_search_document_and_any_of_its_plans() -> None:
    """Each plan of an answer is drawn in its own framework's terms; the points are the same."""
    document = suggest(PlanRequest(model="llama-3.1-8b", cluster=ClusterInput(gpu="h100", gpus=16), job=JOB))
    first = pictures(document)
    assert len(first.points) > 5
    assert pictures(document, document.best) == first
    for plan in [*document.alternatives, *filter(None, document.by_backend.values())]:
        drawn = pictures(document, plan)
        check(document, plan, drawn)
        assert drawn.points == first.points


def test_names_are_passed_on_as_they_are() -> None:
    """Figures hold no text of the user's but the names of axes and terms: nothing to escape comes from a model name."""
    document = estimate("llama-3.2-1b", ClusterInput(gpu="h100", gpus=8), JOB, StrategyInput())
    model = document.request.model.model_copy(update={"name": "<script>alert(1)</script>"})
    request = document.request.model_copy(update={"model": model})
    assert "script" not in pictures(document.model_copy(update={"request": request})).model_dump_json()
