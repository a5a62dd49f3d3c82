"""The small parts of the search: scaling, layouts, pins, conversion, determinism and the infeasible report."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from planner.backends import BACKENDS, get_backend
from planner.cost.evaluate import CostContext, evaluate
from planner.errors import InputError, TimeLimitError
from planner.search.engine import GRACE_S, Problem, feasible, search
from planner.search.exhaustive import compositions, every_strategy
from planner.search.explain import explain
from planner.search.incumbent import Incumbents
from planner.search.inner import Inner
from planner.search.outcome import Pin, Progress
from planner.search.pins import read_pins
from planner.search.relax import explain_infeasible
from planner.search.scaling import RESOLUTION, to_integer, to_integers, unit_for
from planner.search.space import enumerate_space, even_layout, stage_cap
from planner.search.waterfill import least_level
from planner.specs.batch import StrategyBatch
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from tests.contract.search_problems import GIB, cluster, problem


def dense_model(layers: int = 8, hidden: int = 2048, heads: int = 16) -> ModelSpec:
    """A plain dense model."""
    return ModelSpec(
        name="dense", layers=layers, hidden=hidden, ffn=4 * hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=32_000, max_seq=8192,
    )  # fmt: skip


def question(gpus: int = 8, memory_gib: int = 79, pins: Mapping[str, Pin] | None = None) -> Problem:
    """A dense model on some GPUs, for Megatron-LM."""
    job = Job(seq_len=4096, global_batch=32)
    return Problem(
        CostContext(dense_model(), cluster(gpus, memory_gib * GIB), job, get_backend("megatron")), pins or {}
    )


def test_scaling_error_bounds() -> None:
    """Nearest is within half a unit; up and down are on their side and within one unit."""
    rng = random.Random(1)
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-9, 3) for _ in range(500)]
    unit = unit_for(max(values))
    assert max(values) / unit == pytest.approx(RESOLUTION)
    for value, near, up, down in zip(
        values, *(to_integers(values, unit, rounding) for rounding in ("nearest", "up", "down")), strict=True
    ):
        assert abs(value - near * unit) <= unit / 2 * (1 + 1e-6)
        assert -1e-6 * unit <= up * unit - value < unit * (1 + 1e-6)
        assert -1e-6 * unit <= value - down * unit < unit * (1 + 1e-6)
    assert unit_for(0.0) == 1.0
    assert to_integer(2.5, 1.0, "up") == 3


def test_layouts() -> None:
    """Even layouts hold every layer, longer stages in the middle; compositions are complete and distinct."""
    assert even_layout(8, 4) == (2, 2, 2, 2)
    assert even_layout(10, 4) == (2, 3, 3, 2)
    splits = compositions(6, 3)
    assert len(splits) == 10
    assert len({tuple(row) for row in splits.tolist()}) == 10
    assert (splits.sum(axis=1) == 6).all()
    assert splits.min() == 1
    assert stage_cap(61, 16, 2) == 2
    assert stage_cap(61, 16, 1) == 46


def test_least_level_is_the_least() -> None:
    """Water-filling agrees with trying every level."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        ranks = np.array([1, int(rng.integers(1, 5)), 1])
        slope, extra = float(rng.uniform(0.1, 2)), rng.uniform(0, 3, 3)
        layers = int(ranks.sum() + rng.integers(0, 20))
        levels = sorted(slope * n + e for n in range(1, layers + 1) for e in extra)
        expected = next(
            level
            for level in levels
            if (np.floor((level - extra) / slope + 1e-9) >= 1).all()
            and (np.floor((level - extra) / slope + 1e-9) * ranks).sum() >= layers
        )
        found = least_level(np.array([[slope]]), extra[None, :], ranks, layers, 1)[0]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("pins", "allowed"),
    [
        ({"tp": 3}, "1, 2, 4, 8"),
        ({"tp": 8, "pp": 2}, "product"),
        ({"zero_stage": 3}, "0, 1"),
        ({"recompute": "everything"}, "full"),
        ({"micro_batch": 5}, "1, 2, 4"),
        ({"offload": "nvme"}, "none"),
        ({"ep": 2}, "1"),
    ],
    ids=["tp", "product", "zero-stage", "recompute", "micro-batch", "offload", "ep"],
)
def test_impossible_pins_say_what_is_allowed(pins: dict[str, Pin], allowed: str) -> None:
    """A pinned value that cannot be ends in exit code 2 with the values that can."""
    with pytest.raises(InputError) as caught:
        search(question(pins=pins))
    assert caught.value.where == ", ".join(f"pins.{name}" for name in pins)
    assert allowed in str(caught.value.allowed)
    assert caught.value.hint


def test_pin_against_a_rule_quotes_the_equation() -> None:
    """A pinned degree that a rule forbids names the rule, its equation with the values, and what it accepts."""
    base = question(gpus=64)
    model = dense_model(heads=8)
    with pytest.raises(InputError) as caught:
        search(Problem(replace(base.context, model=model), {"tp": 16}))
    assert caught.value.where == "pins.tp"
    assert "heads(8) % tp(16)" in caught.value.message
    assert "heads-over-tp" in caught.value.message
    assert "tp in 1, 2, 4, 8" in str(caught.value.allowed)


def test_unknown_pin_offers_the_near_name() -> None:
    """A misspelt pin is answered with the name that was meant."""
    with pytest.raises(InputError) as caught:
        read_pins({"zero_stag": 1})
    assert "zero_stage" in str(caught.value.hint)
    assert read_pins({"tp": "8", "sequence_parallel": "true"}) == {"tp": 8, "sequence_parallel": True}
    with pytest.raises(InputError):
        read_pins({"tp": "many"})


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2},
        {"pp": 4, "vpp": 2},
        {"micro_batch": 2, "dp": 4},
        {"recompute": "full"},
        {"offload": "cpu"},
        {"zero_stage": 0},
    ],
    ids=str,
)
def test_pins_are_kept(pins: dict[str, Pin]) -> None:
    """Best plan and alternatives have the pinned values."""
    asked = question(pins=pins)
    outcome = search(asked)
    assert outcome.best is not None
    for batch in (outcome.best, *outcome.alternatives):
        plan = to_strategy(batch, 0, asked.context.recompute_kinds, asked.context.job)
        for name, value in pins.items():
            given = {"recompute": plan.recompute.mode, "offload": plan.offload.device}.get(name)
            assert (given if given is not None else getattr(plan, name)) == value


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_conversion_round_trip(backend: str) -> None:
    """Every strategy of some small problems survives the way to the document and back, at the same price."""
    seen = 0
    for seed in range(6):
        asked = problem(BACKENDS[backend], seed)
        context = asked.context
        for batch in every_strategy(asked):
            for row in range(0, len(batch), 1 + len(batch) // 25):
                plan = to_strategy(batch, row, context.recompute_kinds, context.job)
                assert plan.gpus == context.cluster.gpus
                back = from_strategy(plan, context.recompute_kinds)
                assert to_strategy(back, 0, context.recompute_kinds, context.job) == plan
                mine, theirs = evaluate(context, batch.take([row])), evaluate(context, back)
                assert theirs.step_time_s[0] == pytest.approx(mine.step_time_s[0], rel=1e-12)
                assert theirs.peak_memory_bytes[0] == pytest.approx(mine.peak_memory_bytes[0], rel=1e-12)
                seen += 1
    assert seen > 50


def test_conversion_refuses_what_no_framework_says() -> None:
    """Unequal recomputed layers and unknown modules are answered with what exists."""
    asked = question()
    kinds, job = asked.context.recompute_kinds, asked.context.job
    best = search(asked).best
    assert best is not None
    plan = to_strategy(best, 0, kinds, job)
    full = plan.model_copy(update={"pp": 2, "dp": plan.dp, "layers_per_stage": (4, 4), "vpp": 1})
    uneven = full.model_copy(
        update={"recompute": plan.recompute.model_copy(update={"mode": "full", "layers_per_stage": (1, 2)})}
    )
    with pytest.raises(InputError) as caught:
        from_strategy(uneven, kinds)
    assert "[2, 2]" in str(caught.value.allowed)
    unknown = plan.model_copy(
        update={"recompute": plan.recompute.model_copy(update={"mode": "selective", "modules": ("nothing",)})}
    )
    with pytest.raises(InputError):
        from_strategy(unknown, kinds)
    with pytest.raises(InputError):
        from_strategy(plan.model_copy(update={"layers_per_stage": ()}), kinds)


def same(a: StrategyBatch, b: StrategyBatch) -> bool:
    """All columns equal."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)


def test_deterministic() -> None:
    """The same question gives the same plan and the same alternatives, in one process and the next."""
    first, second = search(question()), search(question())
    assert first.best is not None
    assert second.best is not None
    assert same(first.best, second.best)
    assert len(first.alternatives) == len(second.alternatives)
    assert all(same(a, b) for a, b in zip(first.alternatives, second.alternatives, strict=True))
    program = (
        "from tests.unit.test_search_parts import question, search, to_strategy; q = question(); "
        "print(to_strategy(search(q).best, 0, q.context.recompute_kinds, q.context.job).model_dump_json())"
    )
    printed = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    asked = question()
    mine = to_strategy(first.best, 0, asked.context.recompute_kinds, asked.context.job).model_dump_json()
    assert printed == {mine + "\n"}


def test_alternatives_are_ranked_and_on_other_meshes() -> None:
    """No two plans share a mesh, and none is faster than the one before it."""
    asked = question()
    outcome = search(asked, top=4)
    assert outcome.best is not None
    assert len(outcome.alternatives) == len(outcome.alternatives_proven) == 4
    plans = StrategyBatch.concatenate([outcome.best, *outcome.alternatives])
    meshes = zip(plans.tp, plans.cp, plans.pp, plans.ep, plans.dp, plans.zero_stage, strict=True)
    assert len({tuple(int(x) for x in mesh) for mesh in meshes}) == 5
    times = evaluate(asked.context, plans).step_time_s
    assert (np.diff(times) >= -1e-9 * times[0]).all()
    assert outcome.gap == 0.0
    assert outcome.best_bound_s == pytest.approx(float(times[0]))


def test_infeasible_report_works_when_followed() -> None:
    """Pins that leave no room are reported with the miss in bytes, and the change offered leads to a plan."""
    asked = question(memory_gib=6, pins={"recompute": "none", "offload": "none", "tp": 1, "pp": 1})
    outcome = search(asked)
    assert outcome.status == "infeasible"
    report = outcome.infeasible
    assert report is not None
    assert report.nearest is not None
    assert report.nearest.excess_bytes > 0
    assert not evaluate(asked.context, report.nearest.batch).fits[0]
    assert outcome.rejected["does-not-fit"] > 0
    assert report.relaxations
    change = report.relaxations[0]
    assert change.field == "pin"
    followed = Problem(asked.context, {name: value for name, value in asked.pins.items() if name != change.value})
    assert search(followed).best is not None


def test_more_gpus_are_offered_when_they_help() -> None:
    """Without pins the least number of GPUs tried that fits is offered, and a plan exists on them."""
    asked = question(gpus=1, memory_gib=5)
    outcome = search(asked)
    assert outcome.status == "infeasible"
    assert outcome.infeasible is not None
    gpus = [change for change in outcome.infeasible.relaxations if change.field == "gpus"]
    assert gpus
    larger = asked.context.cluster.model_copy(update={"gpus": int(gpus[0].value)})
    assert search(Problem(replace(asked.context, cluster=larger))).best is not None


def test_time_limit_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that are left when the time is up are an error of its own, not an infeasible problem."""

    def none(inner: Inner, *given: object, **named: object) -> Incumbents:
        nothing, rows = np.full(len(inner), np.inf), np.zeros(len(inner), dtype=np.int64)
        return Incumbents(nothing, nothing.copy(), inner.group.batch.stage_layers.copy(), rows, rows.copy())

    monkeypatch.setattr("planner.search.frontier.construct", none)
    with pytest.raises(TimeLimitError):
        search(question(), time_limit_s=0.0)
    assert search(question(), time_limit_s=60.0).best is not None


def test_a_first_plan_is_waited_for_a_little_only() -> None:
    """Long after the limit a search ends wherever it is; a question about a changed question waits for nothing."""
    assert search(question(), time_limit_s=0.0).best is not None
    with pytest.raises(TimeLimitError):
        search(question(), time_limit_s=-GRACE_S)
    with pytest.raises(TimeLimitError):
        feasible(question(), 1e-9)


def test_enumeration_looks_at_the_clock() -> None:
    """Also while candidates are only counted."""
    calls = iter(range(5))

    def give_up() -> None:
        if next(calls, None) is None:
            raise TimeLimitError("no time is left")

    with pytest.raises(TimeLimitError):
        enumerate_space(question().context, {}, give_up)


def test_infeasible_however_little_time() -> None:
    """That no candidate is left is known without time; what would help is not looked for any more, and that is said."""
    report = search(question(memory_gib=5, gpus=1), time_limit_s=0.0).infeasible
    assert report is not None
    assert report.nearest is not None
    assert (report.relaxations, report.complete) == ((), False)


def test_changes_found_in_time_are_kept() -> None:
    """The limit ends the search for changes that help; those that were found until then stay."""
    asked = question(gpus=1, memory_gib=5)
    answers = iter([False, True])

    def twice(_: Problem) -> bool:
        for answer in answers:
            return answer
        raise TimeLimitError("no time is left")

    report = explain_infeasible(asked, enumerate_space(asked.context, {}), {}, twice)
    assert [change.field for change in report.relaxations] == ["backend"]
    assert not report.complete


def test_objective_memory_needs_less() -> None:
    """Minimising memory finds a plan with at most the memory of the fastest one."""
    fast = question()
    small = Problem(replace(fast.context, job=fast.context.job.model_copy(update={"objective": "memory"})))
    plans = [search(asked).best for asked in (fast, small)]
    assert plans[0] is not None
    assert plans[1] is not None
    memory = [float(evaluate(fast.context, plan).peak_memory_bytes[0]) for plan in plans if plan is not None]
    assert memory[1] < memory[0]


def test_explanation_names_what_binds() -> None:
    """The sentences give memory against its limit and at least one neighbour, none of which is better and fits."""
    asked = question()
    best = search(asked).best
    assert best is not None
    lines = explain(asked.context, best)
    assert lines[0].startswith("memory: ")
    assert "GiB" in lines[0]
    assert any(line.startswith(("micro-batch", "recompute")) for line in lines[1:])
    assert not any("% faster" in line and "limit" not in line for line in lines[1:])


def test_progress_is_reported() -> None:
    """The callback sees the best so far and a bound that does not exceed the answer."""
    seen: list[Progress] = []
    outcome = search(question(), progress=seen.append)
    assert outcome.best_bound_s is not None
    assert seen
    assert all(state.bound_s is not None and state.candidates == outcome.candidates for state in seen)


def test_every_rejection_is_counted() -> None:
    """Rules of the backend appear by id with a positive count."""
    space = enumerate_space(question(gpus=64).context, {})
    ids = {rule.id for rule in get_backend("megatron").rules} | {"layer-split"}
    assert space.rejected
    assert set(space.rejected) <= ids
    assert min(space.rejected.values()) > 0
