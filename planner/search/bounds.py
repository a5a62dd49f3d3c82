"""Lower bounds on the step time (or memory) of every candidate over all its inner decisions, from coefficients alone.

``quick_bound`` knows balance only and is cheap enough for every candidate.  ``full_bound`` adds memory: the fewest
recomputed layers and the smallest offloaded share with which the ranks can hold the model, and ranks that take fewer
layers than balance asks for.  Neither exceeds the true optimum (property test).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.search.capacity import host_steps, rank_caps, sufficient
from planner.search.inner import Inner
from planner.search.waterfill import held, held_recomputing, least_level, least_where
from planner.specs.batch import BoolArray, FloatArray, IntArray

OUT_OF_REACH_S = 1e15
"""A level above any real one, finite because it is multiplied with weights that may be zero."""

LEVELS = 4
"""How many levels of the slowest rank are tried one by one before the recomputed total is bounded loosely."""


@dataclass(frozen=True)
class Needs:
    """Inner decisions that every fitting plan of a candidate must at least take, and the most it can."""

    recomputed: IntArray
    """(N,) fewest recomputed layers of a virtual stage; 0 where not open."""
    step: IntArray
    """(N,) fewest offload steps."""
    most_steps: IntArray
    """(N,) most offload steps that the host allows."""


@dataclass(frozen=True)
class Bound:
    """Bounds of N candidates; infinite where nothing fits."""

    step_time_s: FloatArray
    needs: Needs


def rank_kinds(inner: Inner) -> IntArray:
    """How many ranks there are of each kind that differ in what the ends add: first, middle, last."""
    return np.array({1: [1], 2: [1, 1]}.get(inner.group.pp, [1, inner.group.pp - 2, 1]), dtype=np.int64)


def ends_by_kind(inner: Inner, first: FloatArray, last: FloatArray, common: FloatArray | float = 0.0) -> FloatArray:
    """(N, R) what the ends add on each kind of rank."""
    out = np.zeros((len(first), min(inner.group.pp, 3)))
    out[:, 0] += first
    out[:, -1] += last
    return out + (common[:, None] if isinstance(common, np.ndarray) else common)


def fits_at_all(inner: Inner) -> tuple[Needs, BoolArray]:
    """The loosest needs, and which candidates fit with as much recomputation and offload as there can be."""
    most_steps = host_steps(inner)
    steps = np.maximum(most_steps, 0)
    everything = np.full(len(inner), inner.max_recomputed)
    if inner.group.free:
        enough = sufficient(inner, everything, inner.fraction(steps))
    else:
        steps, enough = _fixed_fits(inner, everything, steps)
    counted = inner.group.counted.astype(np.int64)
    least_step = np.minimum(inner.group.steps, 1)
    possible = enough & (most_steps >= least_step)
    return Needs(counted, least_step, steps), possible


def _fixed_fits(inner: Inner, recomputed: IntArray, steps: IntArray) -> tuple[IntArray, BoolArray]:
    """The most offload steps, at most ``steps``, that the host memory of a fixed layout takes, and which candidates fit
    with them; ``host_steps`` knows only the average rank."""
    rows = np.arange(len(inner))
    least = np.minimum(inner.group.steps, 1)
    while True:
        result = inner.price(rows, inner.group.batch.stage_layers, recomputed, steps)
        fewer = (result.host_memory_bytes_per_node > inner.limits.host_bytes) & (steps > least)
        if not fewer.any():
            return steps, inner.fits(result)
        steps = steps - fewer


def needs_of(inner: Inner, loose: Needs) -> Needs:
    """The fewest recomputed layers and offload steps of candidates that fit at all (bisection on the relaxation)."""

    def enough(recomputed: IntArray, step: IntArray) -> BoolArray:
        if inner.group.free:
            return sufficient(inner, recomputed, inner.fraction(step))
        rows = np.arange(len(inner))
        result = inner.price(rows, inner.group.batch.stage_layers, recomputed, step)
        return np.asarray(result.peak_memory_bytes <= inner.limits.gpu_bytes)

    everything = np.full(len(inner), inner.max_recomputed)
    recomputed, step = loose.recomputed, loose.step
    if inner.group.counted.any():
        open_high = np.where(inner.group.counted, everything, 0)
        recomputed = _bisect(recomputed, open_high, lambda n: enough(n, loose.most_steps))
    if (inner.group.steps > 0).any():
        step = _bisect(step, loose.most_steps, lambda s: enough(everything, s))
    return Needs(recomputed, step, loose.most_steps)


def _bisect(low: IntArray, high: IntArray, holds: object) -> IntArray:
    """(N,) smallest value in [low, high] that holds; ``holds`` is monotone and true at ``high``."""
    while (low < high).any():
        middle = (low + high) // 2
        true = holds(middle)  # type: ignore[operator]
        low, high = np.where(true, low, np.minimum(middle + 1, high)), np.where(true, middle, high)
    return low


def quick_bound(inner: Inner, needs: Needs) -> FloatArray:
    """(N,) step time below which no layout gets, memory ignored."""
    if not inner.group.free:
        return _fixed_bound(inner, needs)
    model = inner.model
    pipeline = _pipeline(inner, _slowest(inner, needs.recomputed), _least_total(inner, needs))
    return pipeline + _tail(inner, needs).least + model.constant_time_s


def core_bound(inner: Inner) -> FloatArray:
    """(N,) step time that no variant of a core (without recomputation and offload) beats.

    Recomputation and offload lengthen the layers or the tail; the part of the traffic that nothing hides stays.
    """
    model, nothing = inner.model, np.zeros(len(inner), dtype=np.int64)
    if inner.group.free:
        pipeline = _pipeline(inner, _slowest(inner, nothing), np.zeros(len(inner)))
    else:
        rows = np.arange(len(inner))
        pipeline = inner.price(rows, inner.group.batch.stage_layers, nothing, nothing).pipeline_time_s
    return np.asarray(pipeline + model.reduce_floor_s + model.constant_time_s)


def full_bound(inner: Inner, loose: Needs) -> Bound:
    """Bounds of candidates that ``fits_at_all`` kept."""
    needs = needs_of(inner, loose)
    if not inner.group.free:
        return Bound(_fixed_bound(inner, needs), needs)
    tail = _tail(inner, needs)
    bound = _levels(inner, needs, None, tail)
    if len(inner.totals) > 1:
        least = _pipeline(inner, _slowest(inner, needs.recomputed), _least_total(inner, needs)) + tail.least
        bound = np.maximum(bound, least)
        for kind in range(len(inner.totals)):
            bound = np.maximum(bound, _levels(inner, needs, kind, tail))
    return Bound(bound + inner.model.constant_time_s, needs)


def _fixed_bound(inner: Inner, needs: Needs) -> FloatArray:
    """A given layout: the pipeline with the least recomputation, the tail with the most to hide behind."""
    rows, layouts = np.arange(len(inner)), inner.group.batch.stage_layers
    everything = np.full(len(inner), inner.max_recomputed)
    least = inner.price(rows, layouts, needs.recomputed, needs.step)
    tail = least.rank_tail_s
    if inner.group.counted.any() or (inner.group.steps > 1).any():
        # A tail falls with the time to hide behind and is linear in the offloaded share: its least is at an end of
        # both.
        for step in (needs.step, needs.most_steps):
            tail = np.minimum(tail, inner.price(rows, layouts, everything, step).rank_tail_s)
    return np.asarray(least.pipeline_time_s + tail.max(axis=1) + inner.model.constant_time_s)


def _pipeline(inner: Inner, slowest: FloatArray, recomputed_s: FloatArray) -> FloatArray:
    """(N,) pipeline time for a slowest rank and a total time of recomputation over all ranks."""
    model = inner.model
    total = (model.layer_time_s * inner.totals).sum(axis=1) + model.first_time_s + model.last_time_s + recomputed_s
    steady = (model.slowest_weight - model.others_weight) * slowest
    return np.asarray(steady + model.others_weight * total + model.p2p_time_s)


def _slowest(inner: Inner, recomputed: IntArray) -> FloatArray:
    """(N,) least time of the slowest rank without recomputation, and of the slowest of each chunk with it."""
    model, group = inner.model, inner.group
    ends = ends_by_kind(inner, model.first_time_s, model.last_time_s)
    ranks = _least_over_kinds(inner, model.layer_time_s, ends, group.least_of_rank)
    return np.maximum(ranks, _chunks(inner, recomputed))


def _chunks(inner: Inner, recomputed: IntArray) -> FloatArray:
    """(N,) least time of the slowest stages of all chunks together, when stages recompute at least so many layers.

    Some stage of every chunk is full, but for chunks of which every stage lacks a layer; and the ends come on top of
    the layers that their stages have at least."""
    model, pp, vpp, full, missing = inner.model, inner.group.pp, inner.group.vpp, inner.max_recomputed, inner.missing
    if vpp == 1:
        return np.zeros(len(inner))
    again = np.minimum(recomputed, full) * model.recompute_time_s.min(axis=1)
    layer = [_least_layer(inner, chunk) for chunk in range(vpp)]
    stages = full * sum(layer) + vpp * again
    spared = (missing // pp) * (np.max(layer, axis=0) + model.recompute_time_s.min(axis=1))

    def above(end: FloatArray, per_layer: FloatArray, lacking: int, least: int) -> FloatArray:
        """(N,) by how much the stage of an end is longer than a full one."""
        held = max(full - lacking, least)
        less = (full - held) * per_layer + again - np.minimum(recomputed, held) * model.recompute_time_s.min(axis=1)
        return np.asarray(np.maximum(end - less, 0.0))

    longer = np.full(len(inner), np.inf)
    for lacking in range(min(missing, full - 1) + 1):
        ends = above(model.first_time_s, layer[0], lacking, 1)
        ends = ends + above(model.last_time_s, layer[-1], missing - lacking, 1 - inner.group.bare_end)
        longer = np.minimum(longer, ends)
    return np.asarray(stages - spared + longer)


def _least_layer(inner: Inner, chunk: int) -> FloatArray:
    """(N,) least time of a layer that a chunk may hold."""
    pp, full, layers, stages = inner.group.pp, inner.max_recomputed, inner.layers, inner.stages
    low = max(chunk * pp, layers - (stages - chunk * pp) * full)
    high = min(layers - int(inner.group.least_layers[(chunk + 1) * pp :].sum()), (chunk + 1) * pp * full)
    there = inner.kind_prefix[high] > inner.kind_prefix[low]
    return np.asarray(inner.model.layer_time_s[:, there].min(axis=1))


def _least_over_kinds(inner: Inner, per_layer: FloatArray, ends: FloatArray, least: int) -> FloatArray:
    """(N,) best bound on the fullest rank: all layers at the cheapest kind's rate, each kind alone, and the average."""
    ranks = rank_kinds(inner)
    best = least_level(per_layer.min(axis=1)[:, None], ends, ranks, inner.layers, least)
    if per_layer.shape[1] > 1 and (per_layer >= 0).all():
        for kind, total in enumerate(inner.totals):
            best = np.maximum(best, least_level(per_layer[:, kind : kind + 1], ends, ranks, int(total), 0))
        mean = ((per_layer * inner.totals).sum(axis=1) + (ends * ranks).sum(axis=1)) / inner.group.pp
        best = np.maximum(best, mean)
    return best


def _least_total(inner: Inner, needs: Needs) -> FloatArray:
    """(N,) least recomputation time of all ranks: one virtual stage holds as many layers as it can, the others one."""
    filled = int(inner.group.least_layers.sum())
    least = np.maximum(needs.recomputed + filled - 1, needs.recomputed * inner.stages - inner.missing)
    layers = np.where(needs.recomputed > 0, np.minimum(inner.layers, least), 0)
    return np.asarray(layers * inner.model.recompute_time_s.min(axis=1))


@dataclass(frozen=True)
class _Tail:
    """The longest tail of a rank: at least ``least``, more where ranks must hold or may only hold so many layers."""

    least: FloatArray
    """(N,)"""
    work: FloatArray
    """(N, 1) optimizer time of a layer."""
    work_ends: FloatArray
    """(N, P) the same of what else a rank holds, and the traffic that nothing hides."""
    exposed: FloatArray
    """(N, 1) traffic of a layer less the window it brings, and its optimizer time."""
    exposed_ends: FloatArray
    alike: bool
    """All layers are of one kind; otherwise only ``least`` is known."""

    def at(self, fewest: IntArray, most: IntArray) -> FloatArray:
        """(N,) when every rank holds between ``fewest`` and ``most`` (N, P) layers."""
        if not self.alike:
            return self.least
        floor = (self.work * fewest + self.work_ends).max(axis=1)
        rest = self.exposed * np.where(self.exposed < 0, most, fewest) + self.exposed_ends
        return np.asarray(np.maximum(self.least, np.maximum(floor, rest.max(axis=1))))


def _tail(inner: Inner, needs: Needs) -> _Tail:
    """Least longest tail: optimizer step with the traffic that nothing hides, or with all traffic less its window."""
    model = inner.model
    low, high = inner.fraction(needs.step), inner.fraction(needs.most_steps)

    def offloaded(seconds: FloatArray) -> FloatArray:
        shape = (-1, *[1] * (seconds.ndim - 1))
        return np.minimum(low.reshape(shape) * seconds, high.reshape(shape) * seconds)

    work = model.layer_optimizer_time_s + offloaded(model.layer_offload_time_s)
    first = model.first_optimizer_time_s + offloaded(model.first_offload_time_s)
    last = model.last_optimizer_time_s + offloaded(model.last_offload_time_s)
    share = model.reduce_window_share
    window = share[:, None] * (model.layer_time_s + model.recompute_time_s)
    exposed = model.layer_reduce_time_s - window + work
    first_exposed = first + model.first_reduce_time_s - share * model.first_time_s
    last_exposed = last + model.last_reduce_time_s - share * model.last_time_s
    least = inner.group.least_of_rank
    floor = _least_over_kinds(inner, work, ends_by_kind(inner, first, last, model.reduce_floor_s), least)
    hidden = (exposed < 0).any(axis=1)
    ends = ends_by_kind(inner, first_exposed, last_exposed)
    rest = _least_over_kinds(inner, np.maximum(exposed, 0.0), ends, least)
    return _Tail(
        least=np.maximum(floor, np.where(hidden, -np.inf, rest)),
        work=work,
        work_ends=_on_ranks(inner, first, last) + model.reduce_floor_s[:, None],
        exposed=exposed,
        exposed_ends=_on_ranks(inner, first_exposed, last_exposed),
        alike=len(inner.totals) == 1,
    )


def _on_ranks(inner: Inner, first: FloatArray, last: FloatArray) -> FloatArray:
    """(N, P) what the ends add on each rank."""
    out = np.zeros((len(inner), inner.group.pp))
    out[:, 0] += first
    out[:, -1] += last
    return out


def _rates(inner: Inner, kind: int | None) -> tuple[FloatArray, FloatArray]:
    """(N, 1) time of a layer of one kind (None: the cheapest) and what its recomputation adds at least.

    A rank may recompute a layer of another kind instead, but then that layer's own time comes on top.
    """
    model = inner.model
    if kind is None:
        return model.layer_time_s.min(axis=1)[:, None], model.recompute_time_s.min(axis=1)[:, None]
    whole = model.layer_time_s + model.recompute_time_s
    whole[:, kind] = model.recompute_time_s[:, kind]
    return model.layer_time_s[:, kind : kind + 1], whole.min(axis=1)[:, None]


def _levels(inner: Inner, needs: Needs, kind: int | None, tail: _Tail) -> FloatArray:
    """(N,) bound of pipeline and tail from the layers of one kind (None: all), infinite where memory cannot hold them.

    Level by level of the slowest rank: at each, every rank holds at most what the level and its memory allow and at
    least what the others leave, which decides how many layers recompute and how long the tails are; beyond the last
    level tried only the least of both is certain.
    """
    model, group = inner.model, inner.group
    everything = np.full(len(inner), inner.max_recomputed)
    caps = np.maximum(rank_caps(inner, kind, everything, inner.fraction(needs.most_steps)), 0)
    layers, least = (inner.layers, group.least_of_rank) if kind is None else (int(inner.totals[kind]), 0)
    ends = _on_ranks(inner, model.first_time_s, model.last_time_s)
    slope, again = _rates(inner, kind)
    # A rank with l layers recomputes at least min(l, spread) of them: one stage holds the surplus, or few layers are
    # missing.
    spread = np.maximum(needs.recomputed + group.least_of_rank - 1, needs.recomputed * group.vpp - inner.missing)
    spread = np.where(needs.recomputed > 0, spread, 0)[:, None]

    def most_at(level: FloatArray, rows: Any = slice(None)) -> IntArray:
        filled = held_recomputing(slope[rows], again[rows], spread[rows], ends[rows], level)
        return np.asarray(np.minimum(filled, caps[rows]))

    def enough(level: FloatArray, rows: IntArray) -> BoolArray:
        return np.asarray(most_at(level, rows).sum(axis=1) >= layers)

    def following(level: FloatArray, rows: IntArray) -> FloatArray:
        return next_level(slope[rows], again[rows], spread[rows], ends[rows], most_at(level, rows), caps[rows])

    first_last = ends_by_kind(inner, model.first_time_s, model.last_time_s)
    lowest = least_level(slope, first_last, rank_kinds(inner), layers, least)
    highest = lowest + (slope + again)[:, 0] * layers + ends.max(axis=1)
    level = least_where(lowest, highest, enough, following)
    impossible = ~np.isfinite(level)
    level = np.where(impossible, 0.0, level)
    loosest = _least_total(inner, needs)
    cheapest = model.recompute_time_s.min(axis=1)
    best = np.full(len(inner), np.inf)
    chunks = _chunks(inner, needs.recomputed)
    for _ in range(LEVELS if group.counted.any() else 1):
        most = most_at(level)
        slack = most.sum(axis=1) - layers
        total = np.minimum(most, spread).sum(axis=1) - np.maximum(slack, 0)
        recomputed = np.maximum(loosest, total * cheapest)
        held_least = np.maximum(most - slack[:, None], 0)
        reached = _pipeline(inner, np.maximum(level, chunks), recomputed) + tail.at(held_least, most)
        best = np.where(slack >= 0, np.minimum(best, reached), best)
        level = next_level(slope, again, spread, ends, most, caps)
    best = np.minimum(best, _pipeline(inner, np.maximum(level, chunks), loosest) + tail.least)
    return np.where(impossible, np.inf, best)


def next_level(
    slope: FloatArray, again: FloatArray, spread: IntArray, ends: FloatArray, most: IntArray, caps: IntArray
) -> FloatArray:
    """(N,) the next level at which some rank holds one layer more; out of reach where memory stops them all."""
    more = most + 1
    reached = slope * more + again * np.minimum(more, spread) + ends
    return np.asarray(np.where(most < caps, reached, OUT_OF_REACH_S).min(axis=1))


def memory_bound(inner: Inner, needs: Needs) -> FloatArray:
    """(N,) least peak memory of the fullest rank, everything recomputed and offloaded that can be."""
    model, group = inner.model, inner.group
    share = inner.fraction(needs.most_steps)
    if not group.free:
        rows, everything = np.arange(len(inner)), np.full(len(inner), inner.max_recomputed)
        return inner.price(rows, group.batch.stage_layers, everything, needs.most_steps).peak_memory_bytes
    state = model.layer_state_bytes - share[:, None] * model.layer_offloadable_bytes
    kept = model.layer_activation_bytes - model.recompute_saved_bytes
    slope = (state[:, None, :] + model.in_flight[:, :, None] * kept[:, None, :]).min(axis=2)
    ends = np.zeros((len(inner), group.pp))
    ends[:, 0] += model.first_state_bytes - share * model.first_offloadable_bytes
    ends[:, 0] += model.in_flight[:, 0] * model.first_activation_bytes
    ends[:, -1] += model.last_state_bytes - share * model.last_offloadable_bytes + model.last_fixed_bytes
    ends += model.fixed_bytes[:, None]
    slope = np.maximum(slope, np.finfo(float).tiny)
    low = (slope * group.least_of_rank + ends).max(axis=1)
    high = (slope * inner.layers + ends).max(axis=1)
    for _ in range(50):
        middle = (low + high) / 2
        enough = held(slope, ends, middle).sum(axis=1) >= inner.layers
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.asarray(low * model.memory_factor + model.device_overhead_bytes)
