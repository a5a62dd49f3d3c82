"""Pipeline closed forms against the simulation of every forward, backward and weight-gradient slot of every rank.

Found with the simulator: equal stages agree to rounding for GPipe, 1F1B, interleaved and ZB-H1, and GPipe also with
unequal ones.  1F1B with unequal stages is never optimistic; it is pessimistic, up to 16 %, where the slowest stage
comes early, because its neighbours' drain then overlaps its steady state.  Interleaved, where the slowest stage of
every chunk counts, is within -5 and +24 % with chunks that differ by a factor of two at random, within 10 % with one
layer of difference, and within -3 and +10 % where a rank is spared elsewhere for what its last chunk holds more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from planner.backends.stacks import STACKS
from planner.cost.evaluate import stage_model
from planner.cost.schedules import (
    interleaved,
    one_forward_one_backward,
    rank_order,
    second_zero_bubble,
    simulate,
    zero_bubble,
)
from planner.cost.stage_model import assemble
from planner.specs.batch import SCHEDULES
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule
from tests.strategies import machines, question, strategy

TOY = ModelSpec(name="toy", layers=64, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64, vocab=512, max_seq=4096)


@dataclass(frozen=True)
class Closed:
    """The product's answer for stages of given length (one unit of time a layer)."""

    seconds: float
    in_flight: list[float]


def closed_form(
    schedule: str, p: int, m: int, stage_layers: Sequence[int], v: int = 1, backend: str = "megatron"
) -> Closed:
    """``assemble`` on the real coefficients with every time but that of the layers set to zero."""
    model = TOY.model_copy(update={"layers": sum(stage_layers)})
    context = question(model, machines(gpus=8 * p), backend, global_batch=8 * m)
    batch = strategy(context, pp=p, vpp=v, dp=8, schedule=schedule, stage_layers=tuple(stage_layers))
    coefficients = stage_model(context, batch)
    zero, one = np.zeros(1), np.ones((1, 1))
    timed = replace(
        coefficients,
        layer_time_s=one,
        recompute_time_s=0 * one,
        first_time_s=zero,
        last_time_s=zero,
        p2p_time_s=zero,
    )
    layers = np.array(stage_layers).reshape(1, v, p, 1)
    result = assemble(timed, layers, np.zeros_like(layers), zero)
    return Closed(float(result.pipeline_time_s[0]), [float(value) for value in coefficients.in_flight[0]])


def split(stage_layers: Sequence[int]) -> tuple[list[float], list[float]]:
    """Forward a third, backward two thirds of a stage's time."""
    return [layers / 3 for layers in stage_layers], [2 * layers / 3 for layers in stage_layers]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 1), (4, 3), (4, 4), (4, 32), (8, 13), (16, 16)])
def test_equal_stages_match_the_simulation(schedule: Schedule, p: int, m: int) -> None:
    """GPipe and 1F1B with equal stages take exactly (m + p - 1) stage times, also where m < p."""
    layers = [6] * p
    run = simulate([rank_order(schedule, rank, p, m) for rank in range(p)], *split(layers))
    closed = closed_form(schedule, p, m, layers)
    assert closed.seconds == pytest.approx(run.seconds, rel=1e-9)
    assert closed.in_flight == run.in_flight


@pytest.mark.parametrize(
    ("p", "m", "v"),
    [
        *[(2, 2, 2), (4, 4, 2), (4, 32, 2), (4, 8, 5), (8, 16, 2), (8, 8, 3)],
        # Fewer micro-batches than ranks, and rounds of more than one for each rank.
        *[(4, 1, 3), (4, 2, 3), (8, 3, 6), (2, 1, 4), (4, 6, 2), (4, 7, 3), (8, 30, 2), (4, 10, 2)],
    ],
)
def test_interleaved_equal_chunks_match_the_simulation(p: int, m: int, v: int) -> None:
    """Interleaving divides fill and drain by the chunks and keeps more micro-batches alive, rank by rank; PyTorch's
    rounds are equal."""
    layers = [3] * (p * v)
    group = m // max(1, m // p)
    run = simulate([interleaved(rank, p, m, v, group) for rank in range(p)], *split(layers), v)
    closed = closed_form("interleaved", p, m, layers, v, backend="pytorch")
    if m % p == 0:
        assert closed == closed_form("interleaved", p, m, layers, v)
    assert closed.seconds == pytest.approx(run.seconds, rel=1e-9)
    assert closed.in_flight == run.in_flight


@pytest.mark.parametrize(
    ("p", "m"), [(2, 2), (2, 4), (4, 8), (4, 12), (8, 16), (8, 32), (4, 1), (4, 3), (8, 2), (8, 7), (2, 1)]
)
def test_zero_bubble_matches_the_simulation(p: int, m: int) -> None:
    """ZB-H1 fills half of the bubble of 1F1B where weight gradients are a quarter of the work."""
    run = simulate([zero_bubble(rank, p, m) for rank in range(p)], [2.25] * p, [2.25] * p, weight=[1.5] * p)
    closed = closed_form("zb-h1", p, m, [6] * p)
    assert closed.seconds == pytest.approx(run.seconds, rel=1e-9)
    assert closed.in_flight == run.in_flight


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 2), (4, 4), (4, 8), (4, 32), (8, 8), (8, 16), (8, 24)])
def test_second_zero_bubble_is_close_to_the_simulation(p: int, m: int) -> None:
    """With 2 p - 1 micro-batches no rank idles once it has begun; below that the first waits for the missing ones.

    Ranks begin and end one after another: the optimizer step does not synchronise them."""
    run = simulate([second_zero_bubble(rank, p, m) for rank in range(p)], [2.0] * p, [2.0] * p, weight=[2.0] * p)
    assert closed_form("zb-h2", p, m, [6] * p).seconds == pytest.approx(run.longest, rel=1e-9 if m >= 2 * p else 0.06)


UNEQUAL = [
    (4, 8, (5, 6, 6, 7)),
    (4, 8, (7, 6, 6, 5)),
    (4, 4, (4, 6, 6, 8)),
    (4, 32, (6, 6, 6, 9)),
    (4, 32, (9, 6, 6, 6)),
    (8, 8, (5, 6, 6, 6, 6, 6, 6, 7)),
    (8, 64, (4, 6, 6, 7, 7, 6, 6, 9)),
    (8, 16, (6, 6, 6, 12, 6, 6, 6, 6)),
]


@pytest.mark.parametrize(("p", "m", "layers"), UNEQUAL)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_unequal_stages_are_close_to_the_simulation(
    schedule: Schedule, p: int, m: int, layers: tuple[int, ...]
) -> None:
    """The slowest stage times m plus the others once: exact for GPipe, at most 8 % too much for 1F1B here."""
    run = simulate([rank_order(schedule, rank, p, m) for rank in range(p)], *split(layers))
    ratio = closed_form(schedule, p, m, layers).seconds / run.seconds
    assert 1.0 - 1e-9 <= ratio <= (1.0 + 1e-9 if schedule == "gpipe" else 1.08)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_random_stages_stay_within_the_stated_error(v: int) -> None:
    """Stages of four to eight layers in any order: 1F1B 0 to +16 %, interleaved -5 to +24 %."""
    rng = np.random.default_rng(7)
    low, high = (-1e-9, 0.16) if v == 1 else (-0.05, 0.24)
    for _ in range(30):
        p = int(rng.choice([2, 4, 8]))
        m = p * int(rng.choice([1, 2, 4]))
        layers = [int(count) for count in rng.integers(4, 9, p * v)]
        orders = [one_forward_one_backward(rank, p, m) if v == 1 else interleaved(rank, p, m, v) for rank in range(p)]
        run = simulate(orders, *split(layers), v)
        closed = closed_form("1f1b" if v == 1 else "interleaved", p, m, layers, v)
        assert low <= closed.seconds / run.seconds - 1.0 <= high, (p, m, layers)


@pytest.mark.parametrize(
    ("p", "m", "layers"),
    [
        (4, 8, (2, 3, 3, 3, 3, 3, 3, 2)),
        (4, 16, (3, 3, 3, 3, 3, 3, 3, 5)),
        (4, 16, (5, 3, 3, 3, 3, 3, 3, 3)),
        (8, 16, (2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2)),
    ],
)
def test_interleaved_unequal_chunks_are_close_to_the_simulation(p: int, m: int, layers: tuple[int, ...]) -> None:
    """Chunks of different length: the slowest of each counts."""
    run = simulate([interleaved(rank, p, m, 2) for rank in range(p)], *split(layers), 2)
    assert closed_form("interleaved", p, m, layers, 2).seconds == pytest.approx(run.seconds, rel=0.10)


@pytest.mark.parametrize("more", [1, 2, 3])
@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 16, 4), (8, 16, 4), (8, 64, 2), (8, 8, 3)])
def test_a_long_chunk_is_not_made_up_for_by_the_other_chunks_of_its_rank(p: int, m: int, v: int, more: int) -> None:
    """All ranks take the same chunk at about the same time: the last rank, which holds as much as the others in all,
    keeps them waiting at its long chunk and waits at its short ones."""
    chunks = np.full((v, p), 4)
    chunks[-1, -1] += more
    for spared in range(more):
        chunks[spared % (v - 1), -1] -= 1
    layers = chunks.reshape(-1).tolist()
    run = simulate([interleaved(rank, p, m, v) for rank in range(p)], *split(layers), v)
    assert run.seconds > 4 * v * m * (1 + 0.05 * more)
    assert -0.03 <= closed_form("interleaved", p, m, layers, v).seconds / run.seconds - 1.0 <= 0.10


@pytest.mark.parametrize(("p", "m", "layers"), UNEQUAL)
def test_one_forward_one_backward_is_a_lower_bound_for_its_total(p: int, m: int, layers: tuple[int, ...]) -> None:
    """No schedule can finish before the slowest stage has done all its work."""
    assert closed_form("1f1b", p, m, layers).seconds >= m * max(layers)


def test_memory_order_of_schedules() -> None:
    """On rank 0 GPipe keeps all micro-batches, ZB-H2 2p - 1, interleaving p + (p - 1)/v, 1F1B and ZB-H1 p."""
    p, m = 4, 16
    kept = {name: closed_form(name, p, m, [4] * p).in_flight[0] for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")}
    kept["interleaved"] = closed_form("interleaved", p, m, [2] * (2 * p), 2).in_flight[0]
    assert kept == {"gpipe": 16.0, "1f1b": 4.0, "zb-h1": 4.0, "zb-h2": 7.0, "interleaved": 5.5}
    assert set(kept) | {"none"} == set(SCHEDULES)


def test_zero_bubble_two_fills_every_rank_twice() -> None:
    """2(p - r) - 1 micro-batches on rank r, never more than there are (arXiv 2401.10241, section 2.2)."""
    assert closed_form("zb-h2", 4, 16, [4] * 4).in_flight == [7.0, 5.0, 3.0, 1.0]
    assert closed_form("zb-h2", 4, 4, [4] * 4).in_flight == [4.0, 4.0, 3.0, 1.0]


def test_searched_schedules_fill_every_rank_alike() -> None:
    """Under one memory limit for all ranks, p micro-batches (ZB-1p) or 2p (ZB-2p) are alive on every rank."""
    context = question(TOY, machines(gpus=32), STACKS["zero-bubble"], global_batch=128)
    for schedule, alive in (("zb-h1", 4.0), ("zb-h2", 8.0)):
        batch = strategy(context, pp=4, dp=8, schedule=schedule, stage_layers=(15, 17, 17, 15))
        assert stage_model(context, batch).in_flight.tolist() == [[alive] * 4]


def test_groups_of_the_interleaved_schedule() -> None:
    """Megatron's --microbatch-group-size-per-virtual-pipeline-stage: larger groups keep more chunks alive."""
    grouped = STACKS["megatron"].with_habits(interleaving_group=5)
    context = question(TOY, machines(gpus=32), grouped, global_batch=320)
    batch = strategy(context, pp=4, vpp=2, dp=8, schedule="interleaved", stage_layers=(8,) * 8)
    assert stage_model(context, batch).in_flight[0].tolist() == [6.0, 5.0, 4.0, 3.0]


def test_trace_of_the_first_rank() -> None:
    """With four stages rank 0 runs F1 F2 F3 F4 B1 F5 B2."""
    trace = [f"{kind}{micro + 1}" for kind, _, micro in one_forward_one_backward(0, 4, 8)[:7]]
    assert trace == ["F1", "F2", "F3", "F4", "B1", "F5", "B2"]
