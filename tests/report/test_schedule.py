"""The drawn pipeline: cut where it is long, timed over all micro-batches, and close to what the estimate says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from planner.cost.context import CostContext
from planner.cost.schedules import rank_order, simulate
from planner.cost.stage_times import stage_times
from planner.report.figures.schedule import schedule
from planner.specs.batch import StrategyBatch
from planner.specs.convert import to_strategy
from planner.specs.pictures import Schedule
from tests.strategies import estimated, machines, question, strategy


def drawn(context: CostContext, **columns: Any) -> Schedule:
    batch = strategy(context, **columns)
    found = schedule(context, batch, to_strategy(batch, 0, context.recompute_kinds, context.job))
    assert found is not None
    return found


def all_seconds(context: CostContext, batch: StrategyBatch, name: Any, m: int) -> float:
    """Every micro-batch of the step simulated one by one."""
    p, v = int(batch.pp[0]), int(batch.vpp[0])
    times = stage_times(context, batch)
    orders = [rank_order(name, rank, p, m, v) for rank in range(p)]
    return simulate(orders, times.forward.tolist(), times.backward.tolist(), v).seconds


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"tp": 8, "pp": 8}, "1f1b"),
        ({"tp": 8, "pp": 4, "vpp": 4, "dp": 2}, "interleaved"),
        ({"tp": 8, "pp": 8, "recompute": "full", "recompute_layers": 1}, "1f1b"),
    ],
)
def test_long_steps_are_timed_as_if_simulated_whole(columns: dict[str, Any], name: str) -> None:
    """Thousands of micro-batches are extrapolated from the period of the first: the result is the same."""
    context = question("llama-3-70b", machines(gpus=64), global_batch=4096)
    found = drawn(context, **columns)
    m = 4096 // columns.get("dp", 1)
    assert found.micro_batches == m > found.shown_micro_batches
    assert found.simulated_s == pytest.approx(all_seconds(context, strategy(context, **columns), name, m), rel=1e-6)


def test_stages_that_are_nearly_alike() -> None:
    """One stage a hair slower than the others takes long to hold them up; the extrapolated time is still right."""
    context = question("llama-3-70b", machines(gpus=64), global_batch=8192)
    columns: dict[str, Any] = {"tp": 8, "pp": 8, "stage_layers": (10, 10, 11, 10, 10, 10, 10, 9)}
    found = drawn(context, **columns)
    whole = all_seconds(context, strategy(context, **columns), "1f1b", 8192)
    assert found.simulated_s == pytest.approx(whole, rel=1e-4)


def test_all_micro_batches_of_a_short_step_are_drawn() -> None:
    """The last slot ends when the simulation does, and the busy share is the drawn one."""
    context = question("llama-3-70b", machines(gpus=64), global_batch=16)
    found = drawn(context, tp=8, pp=8)
    assert found.shown_micro_batches == found.micro_batches == 16
    assert max(slot.end_s for slot in found.slots) == found.simulated_s
    busy = sum(slot.end_s - slot.start_s for slot in found.slots)
    assert found.busy_share == pytest.approx(busy / 8 / found.simulated_s)


def test_the_phases_of_one_forward_one_backward() -> None:
    """Rank r warms up with p - 1 - r forward passes and cools down with as many backward passes."""
    context = question("llama-3-70b", machines(gpus=64), global_batch=16)
    found = drawn(context, tp=8, pp=8)
    for rank, slots in itertools.groupby(found.slots, key=lambda slot: slot.stage):
        row = list(slots)
        warm = [slot.kind for slot in row if slot.phase == "warm-up"]
        cool = [slot.kind for slot in row if slot.phase == "cool-down"]
        assert (warm, cool) == (["forward"] * (7 - rank), ["backward"] * (7 - rank))


def test_no_steady_state_without_enough_micro_batches() -> None:
    """GPipe has none at all, 1F1B none on ranks that have sent everything before the first gradient comes."""
    context = question("llama-3-70b", machines(gpus=64), global_batch=2)
    first = [slot.phase for slot in drawn(context, tp=8, pp=8).slots if slot.stage == 0]
    assert first == ["warm-up"] * 2 + ["cool-down"] * 2
    nanotron = question("llama-3-70b", machines(gpus=64), "nanotron", global_batch=16)
    phases = {slot.phase for slot in drawn(nanotron, tp=8, pp=8, schedule="gpipe").slots}
    assert phases == {"warm-up", "cool-down"}


def test_weight_gradients_are_slots_of_their_own() -> None:
    """ZB-H1 splits backward passes; all slots of a rank together are its time."""
    context = question("llama-3-8b", machines(gpus=4), "pytorch", global_batch=8)
    found = drawn(context, pp=4, schedule="zb-h1")
    batch = strategy(context, pp=4, schedule="zb-h1")
    times = stage_times(context, batch)
    for stage in range(4):
        row = [slot for slot in found.slots if slot.stage == stage]
        assert {slot.kind for slot in row} == {"forward", "backward", "weight-gradient"}
        seconds = sum(slot.end_s - slot.start_s for slot in row)
        assert seconds == pytest.approx(8 * (times.forward + times.backward)[stage])


@pytest.mark.parametrize(("m", "columns"), [(1, {"vpp": 5}), (3, {"vpp": 5}), (16, {}), (16, {"vpp": 5}), (64, {})])
def test_equal_stages_take_what_the_estimate_says(m: int, columns: dict[str, Any]) -> None:
    """Where the closed form is exact so is the picture: stages all alike, and nearly so with the ends beside them."""
    context = question("llama-3-70b", machines(gpus=4), "pytorch", global_batch=m)
    batch = strategy(context, pp=4, **columns)
    times = stage_times(context, batch)
    p, v = 4, columns.get("vpp", 1)
    group = m // max(1, m // p)
    equal = [float(times.forward[1])] * (p * v), [float(times.backward[1])] * (p * v)
    name: Any = "interleaved" if v > 1 else "1f1b"
    run = simulate([rank_order(name, rank, p, m, v, group) for rank in range(p)], *equal, v)
    stage = v * (equal[0][0] + equal[1][0])
    bubble = (max(p - m, 0) + (min(m, p) - 1) / v) if v > 1 else p - 1
    assert run.seconds == pytest.approx((m + bubble) * stage)
    found = drawn(context, pp=4, **columns)
    tree = estimated(context, pp=4, **columns).time
    closed = sum(part.value for part in tree.children if " x " in part.name or part.name == "pipeline bubble")
    assert found.simulated_s == pytest.approx(closed, rel=0.03)


def test_no_pipeline_no_picture() -> None:
    context = question()
    batch = strategy(context)
    assert schedule(context, batch, to_strategy(batch, 0, context.recompute_kinds, context.job)) is None


@pytest.mark.parametrize(("cores", "drawable"), [(8, True), (2, False)])
def test_ranks_that_share_cores_have_no_picture(cores: int, drawable: bool) -> None:
    """An idle rank leaves its core to the others: stage times depend on who waits, which no fixed slots can show."""
    cluster = machines("cpu", 4, host_cores_per_node=cores, host_memory_bytes_per_node=1 << 36)
    context = question("llama-3.2-1b", cluster, "pytorch", precision="fp32")
    batch = strategy(context, pp=4)
    found = schedule(context, batch, to_strategy(batch, 0, context.recompute_kinds, context.job))
    assert (found is not None) == drawable
