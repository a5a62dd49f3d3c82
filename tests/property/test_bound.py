"""Bounds, constructions and constraint models against brute force on coefficients that no physics constrains."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost.stage_model import StageModel
from planner.search.bounds import core_bound, fits_at_all, full_bound, memory_bound, quick_bound
from planner.search.exhaustive import compositions
from planner.search.incumbent import construct
from planner.search.inner import Inner, Limits
from planner.search.model import solve
from planner.search.scaling import RELATIVE_ERROR
from planner.search.space import Group, even_layout, stage_cap
from planner.specs.batch import EVERY_LAYER, StrategyBatch

GIB = 2.0**30


def batch_of_one(pp: int, vpp: int, layout: tuple[int, ...]) -> StrategyBatch:
    """A row whose degrees do not matter here."""
    ones, zeros = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return StrategyBatch(
        tp=ones, sequence_parallel=ones > 1, cp=ones, pp=ones * pp, vpp=ones * vpp, schedule=zeros, ep=ones, etp=ones,
        dp=ones, zero_stage=ones, shard_degree=ones, secondary_shard_degree=zeros, micro_batch=ones,
        recompute_kind=ones, recompute_layers=ones * EVERY_LAYER, offload_optimizer=np.ones(1), offload_device=ones,
        offload_parameters=zeros, stage_layers=np.array([layout]),
    )  # fmt: skip


@st.composite
def candidates(draw: st.DrawFn) -> Inner:
    """One candidate: 1 to 4 ranks, 1 or 2 chunks, one or two kinds of layers in any order, any mixture of choices."""
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]))
    layers = draw(st.integers(max(pp * vpp, 2), 7))
    pattern = draw(st.sampled_from(["alike", "run", "mixed"]))
    kinds = np.zeros(layers, dtype=np.int64)
    if pattern == "run":
        kinds[draw(st.integers(1, layers - 1)) :] = 1
    if pattern == "mixed":
        kinds[1:] = draw(st.lists(st.integers(0, 1), min_size=layers - 1, max_size=layers - 1))
    count = int(kinds.max()) + 1
    one_hot = np.eye(count, dtype=np.int64)[kinds]
    prefix = np.concatenate([np.zeros((1, count), dtype=np.int64), one_hot.cumsum(axis=0)])
    number = st.floats(0.0, 1.0, allow_subnormal=False).map(lambda x: round(x, 3))

    def row(scale: float, width: int | None = None, least: float = 0.0) -> np.ndarray:
        values = [scale * (least + draw(number)) for _ in range(width or 1)]
        return np.array([values]) if width else np.array(values)

    flight = np.sort(row(3.0, pp, 0.3), axis=1)[:, ::-1].copy()
    activation = row(2 * GIB, count, 0.1)
    state = row(4 * GIB, count, 0.2)
    model = StageModel(
        pp=pp, slowest_weight=np.array([float(draw(st.integers(1, 9)))]),
        others_weight=np.array([draw(st.sampled_from([1.0, 0.5, 1 / 3]))]),
        layer_time_s=row(0.1, count, 0.1), recompute_time_s=row(0.05, count, 0.02), first_time_s=row(0.05),
        last_time_s=row(0.3), p2p_time_s=row(0.01), constant_time_s=row(0.01), layer_reduce_time_s=row(0.2, count),
        first_reduce_time_s=row(0.2), last_reduce_time_s=row(0.2), reduce_window_share=row(0.9),
        reduce_floor_s=row(0.02), layer_optimizer_time_s=row(0.02, count), first_optimizer_time_s=row(0.05),
        last_optimizer_time_s=row(0.05), layer_offload_time_s=row(0.3, count), first_offload_time_s=row(0.2),
        last_offload_time_s=row(0.2), layer_state_bytes=state, layer_offloadable_bytes=state * draw(number),
        first_state_bytes=row(2 * GIB, None, 1.0), last_state_bytes=row(2 * GIB, None, 1.0),
        first_offloadable_bytes=row(GIB), last_offloadable_bytes=row(GIB), layer_activation_bytes=activation,
        recompute_saved_bytes=activation * 0.9 * draw(number), first_activation_bytes=row(0.1 * GIB), in_flight=flight,
        fixed_bytes=row(GIB), last_fixed_bytes=row(GIB), step_temporary_layer_bytes=row(0.5 * GIB, count),
        layer_host_bytes=row(4 * GIB, count), first_host_bytes=row(2 * GIB), last_host_bytes=row(2 * GIB),
        fixed_host_bytes=row(GIB), local_ranks=np.array([8.0]), memory_factor=np.array([1.04]),
        device_overhead_bytes=row(GIB),
    )  # fmt: skip
    counted, steps = draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 4]))
    if not counted:
        model = replace(model, recompute_time_s=np.zeros((1, count)), recompute_saved_bytes=np.zeros((1, count)))
    free = pp * vpp > 1 and draw(st.sampled_from([True, True, True, False]))
    layout = batch_of_one(pp, vpp, even_layout(layers, pp * vpp))
    bare = free and vpp > 1 and draw(st.booleans())
    group = Group(pp, vpp, free, layout, np.array([counted]), np.array([steps]), bare)
    limits = Limits(draw(st.sampled_from([8.0, 14.0, 20.0, 40.0])) * GIB, draw(st.sampled_from([60.0, 500.0])) * GIB)
    return Inner(group, model, prefix, limits)


def decisions(inner: Inner) -> list[tuple[np.ndarray, int, int]]:
    """Every decision of the candidate."""
    layouts = inner.group.batch.stage_layers
    if inner.group.free:
        layouts = compositions(inner.layers, inner.stages, bare_end=inner.group.bare_end)
        layouts = layouts[(layouts <= stage_cap(inner.layers, inner.group.pp, inner.group.vpp)).all(axis=1)]
    counts = range(1, int(layouts.max()) + 1) if inner.group.counted[0] else [0]
    steps = range(1, int(inner.group.steps[0]) + 1) if inner.group.steps[0] else [0]
    return [(layout, count, step) for layout in layouts for count in counts for step in steps]


def brute_force(inner: Inner) -> tuple[float, float]:
    """(least step time, least memory) over all decisions that fit; infinite if there is none."""
    every = decisions(inner)
    rows = np.zeros(len(every), dtype=np.int64)
    layouts, counts, steps = (np.array([choice[i] for choice in every]) for i in range(3))
    result = inner.price(rows, layouts, counts, steps)
    fits = inner.fits(result)
    return (
        float(result.step_time_s[fits].min(initial=np.inf)),
        float(result.peak_memory_bytes[fits].min(initial=np.inf)),
    )


SETTINGS = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SETTINGS
@given(candidates())
def test_no_bound_exceeds_the_optimum(inner: Inner) -> None:
    """Quick, full and memory bounds stay at or below the best decision; what is called unfit has none."""
    optimum, memory = brute_force(inner)
    loose, possible = fits_at_all(inner)
    if not possible[0]:
        assert optimum == np.inf
        return
    assert quick_bound(inner, loose)[0] <= optimum * (1 + 1e-9)
    bound = full_bound(inner, loose)
    assert bound.step_time_s[0] <= optimum * (1 + 1e-9)
    assert optimum == np.inf or memory_bound(inner, bound.needs)[0] <= memory * (1 + 1e-9)


@SETTINGS
@given(candidates())
def test_core_bound_holds_for_variants(inner: Inner) -> None:
    """A bound without recomputation and offload is also a bound with them."""
    optimum, _ = brute_force(inner)
    assert core_bound(inner)[0] <= optimum * (1 + 1e-9)


@SETTINGS
@given(candidates())
def test_solver_and_constructions(inner: Inner) -> None:
    """The constraint model finds exactly the brute-force optimum; a construction is never better than it."""
    optimum, memory = brute_force(inner)
    loose, possible = fits_at_all(inner)
    if not possible[0] or not inner.group.free:
        return
    bound = full_bound(inner, loose)
    found = construct(inner, bound.needs, bound.step_time_s)
    assert found.step_time_s[0] >= optimum * (1 - 1e-9)
    solution = solve(inner, bound.needs)
    least = solve(inner, bound.needs, minimise_memory=True)
    if optimum == np.inf:
        assert solution.layout is None
        assert least.layout is None
        return
    row = np.zeros(1, dtype=np.int64)
    for answer, name, value in ((solution, "step_time_s", optimum), (least, "peak_memory_bytes", memory)):
        assert answer.status == "optimal"
        assert answer.layout is not None
        result = inner.price(row, answer.layout[None, :], row + answer.recomputed, row + answer.step)
        assert inner.fits(result)[0]
        assert abs(float(getattr(result, name)[0]) / value - 1) < RELATIVE_ERROR
    assert solution.bound_s <= optimum * (1 + RELATIVE_ERROR)


def test_less_offload_where_one_rank_has_more_layers() -> None:
    """Ranks of 1 and 3 layers, 10 GiB of host memory a layer: 25 GiB hold three quarters of the optimizer, not all."""
    zero, zeros, one = np.zeros(1), np.zeros((1, 1)), np.ones((1, 1))
    names = {field.name for field in fields(StageModel)}
    coefficients: dict[str, Any] = dict.fromkeys(names, zero)
    coefficients |= dict.fromkeys((name for name in names if name.startswith(("layer_", "recompute_"))), zeros)
    model = StageModel(
        **{
            **coefficients, "pp": 2, "slowest_weight": np.ones(1), "others_weight": np.ones(1),
            "in_flight": np.ones((1, 2)), "layer_state_bytes": GIB * one, "layer_offloadable_bytes": GIB * one,
            "layer_host_bytes": 10 * GIB * one, "step_temporary_layer_bytes": zeros, "local_ranks": np.ones(1),
            "memory_factor": np.ones(1),
        }
    )  # fmt: skip
    prefix = np.arange(5)[:, None]
    group = Group(2, 1, False, batch_of_one(2, 1, (1, 3)), np.array([False]), np.array([4]))
    needs, possible = fits_at_all(Inner(group, model, prefix, Limits(8 * GIB, 25 * GIB)))
    assert possible[0]
    assert needs.most_steps[0] == 3
    _, possible = fits_at_all(Inner(group, model, prefix, Limits(8 * GIB, 7 * GIB)))
    assert not possible[0]
