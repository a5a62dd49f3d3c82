"""The event simulation itself: no rank does two things at once, nothing starts before what it needs, and the stage
times it is given are those of the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.backends import BACKENDS
from planner.cost.context import Work
from planner.cost.evaluate import layer_counts, recomputed_counts
from planner.cost.schedules import BACKWARD, FORWARD, WEIGHT, Op, rank_order, simulate
from planner.cost.stage_model import assemble
from planner.cost.stage_times import stage_times
from planner.cost.step import Step
from planner.service.profiles import context_of
from planner.specs.convert import from_strategy
from planner.specs.strategy import Schedule
from tests.random_plans import random_plans
from tests.strategies import question, strategy

SHAPES = st.tuples(
    st.sampled_from(("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)


@given(SHAPES)
def test_slots_wait_for_what_they_need(shape: tuple[Schedule, int, int, int, object]) -> None:
    """For any schedule, ranks, micro-batches, chunks and stage times: every slot once, in order, after its inputs."""
    schedule, p, m, v, chance = shape
    v = v if schedule == "interleaved" else 1
    apart = schedule.startswith("zb")
    seconds = [[chance.uniform(0.1, 2.0) for _ in range(p * v)] for _ in range(3)]  # type: ignore[attr-defined]
    orders = [rank_order(schedule, rank, p, m, v) for rank in range(p)]
    run = simulate(orders, seconds[0], seconds[1], v, weight=seconds[2] if apart else ())
    ends: dict[Op, float] = {}
    for rank, order in enumerate(orders):
        wanted = {(kind, c, i) for kind in ("F", "B", *("W" if apart else "")) for c in range(v) for i in range(m)}
        assert sorted(order) == sorted(wanted)
        for (kind, chunk, micro), end in zip(order, run.ends[rank], strict=True):
            ends[kind, chunk * p + rank, micro] = end
    for rank, order in enumerate(orders):
        free = 0.0
        for (kind, chunk, micro), start, end in zip(order, run.starts[rank], run.ends[rank], strict=True):
            stage = chunk * p + rank
            assert start >= free
            assert end - start == pytest.approx(seconds["FBW".index(kind)][stage])
            if kind == FORWARD and stage:
                assert start >= ends[FORWARD, stage - 1, micro]
            if kind == BACKWARD:
                assert start >= ends[FORWARD, stage, micro]
                assert stage == p * v - 1 or start >= ends[BACKWARD, stage + 1, micro]
            if kind == WEIGHT:
                assert start >= ends[BACKWARD, stage, micro]
            free = end
    assert run.seconds == max(ends.values())


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    """A backward pass in front of its own forward pass never runs."""
    with pytest.raises(ValueError, match="waits for itself"):
        simulate([[("B", 0, 0), ("F", 0, 0)]], [1.0], [1.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_stage_times_are_those_of_the_step(backend: str) -> None:
    """Forward and backward of a rank's chunks add up to the time that the step is priced with."""
    for document in random_plans(backend, 25, seed=5):
        context = context_of(document.request, backend)
        batch = from_strategy(document.best.strategy, context.recompute_kinds)
        step = Step(Work(context, batch), int(batch.pp[0]))
        counts = layer_counts(context, batch), recomputed_counts(context, batch)
        priced = assemble(step.model, *counts, batch.offload_optimizer).rank_time_s[0] / step.straggler
        times = stage_times(context, batch)
        total = (times.forward + times.backward).reshape(-1, step.pp).sum(axis=0)
        assert total.tolist() == pytest.approx(priced.tolist(), rel=1e-9)
        assert (times.forward >= 0.0).all()
        assert (times.backward >= times.weight_gradients).all()


def test_recomputation_belongs_to_the_backward_pass() -> None:
    """It repeats about one forward pass and leaves that pass as it is."""
    context = question(global_batch=64)
    plain = stage_times(context, strategy(context, tp=2, pp=4))
    again = stage_times(context, strategy(context, tp=2, pp=4, recompute="full"))
    assert again.forward.tolist() == plain.forward.tolist()
    added = (again.backward - plain.backward) / plain.forward
    assert added[:-1].tolist() == pytest.approx([1.0] * 3, abs=0.2)


def test_one_strategy_at_a_time() -> None:
    context = question()
    with pytest.raises(ValueError, match="one strategy, got 2"):
        stage_times(context, strategy(context).take([0, 0]))
