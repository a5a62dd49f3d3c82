"""Good decisions without a solver, for many candidates at once: layouts that fill the ranks up to the least level,
with the fewest recomputed layers and the smallest offloaded share that can do.

What is found is priced exactly, so it is always a valid plan; where it equals the bound, it is the optimum of its
candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.search.bounds import Needs, ends_by_kind, next_level, rank_kinds
from planner.search.capacity import rank_caps
from planner.search.inner import Inner
from planner.search.waterfill import held_recomputing, least_level, least_where
from planner.specs.batch import BoolArray, FloatArray, IntArray

ALL = 1 << 20
MORE = ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (ALL, 0), (0, ALL), (ALL, ALL))
"""Recomputed layers and offload steps beyond the fewest that are tried; ``ALL`` means as many as there can be."""


@dataclass(frozen=True)
class Incumbents:
    """The best decision found for each of N candidates; times are infinite where none was found."""

    step_time_s: FloatArray
    memory_bytes: FloatArray
    layout: IntArray
    """(N, S)"""
    recomputed: IntArray
    step: IntArray


def construct(inner: Inner, needs: Needs, bound: FloatArray, *, minimise_memory: bool = False) -> Incumbents:
    """Try a few decisions on every candidate that has not reached its ``bound`` (of what is minimised); keep the
    best."""
    least = Incumbents(
        np.full(len(inner), np.inf), np.full(len(inner), np.inf), inner.group.batch.stage_layers.copy(),
        needs.recomputed.copy(), needs.step.copy(),
    )  # fmt: skip
    most = np.where(inner.group.counted, inner.max_recomputed, 0)
    for more_layers, more_steps in MORE:
        recomputed = np.minimum(needs.recomputed + more_layers, most)
        step = np.minimum(needs.step + more_steps, needs.most_steps)
        value = least.memory_bytes if minimise_memory else least.step_time_s
        open_ = ~(value <= bound * (1 + 1e-9))
        if more_layers:
            open_ &= inner.group.counted
        if more_steps:
            open_ &= inner.group.steps > 1
        rows = np.flatnonzero(open_)
        if len(rows):
            _try(inner.take(rows), recomputed[rows], step[rows], least, rows, minimise_memory)
    return least


def _try(
    inner: Inner, recomputed: IntArray, step: IntArray, least: Incumbents, rows: IntArray, minimise_memory: bool
) -> None:
    """Price both kinds of layout for some candidates and note what is better."""
    for layout in _layouts(inner, recomputed, step):
        tried = _priced(inner, layout, recomputed, step)
        keys = [(tried.step_time_s, least.step_time_s[rows]), (tried.memory_bytes, least.memory_bytes[rows])]
        (first, old_first), (second, old_second) = keys[::-1] if minimise_memory else keys
        tie = np.isclose(first, old_first, rtol=1e-12, atol=0.0)
        better = np.where(tie, second < old_second, first < old_first)
        at = rows[better]
        least.step_time_s[at], least.memory_bytes[at] = tried.step_time_s[better], tried.memory_bytes[better]
        least.layout[at], least.recomputed[at], least.step[at] = layout[better], recomputed[better], step[better]


def _priced(inner: Inner, layout: IntArray, recomputed: IntArray, step: IntArray) -> Incumbents:
    result = inner.price(np.arange(len(inner)), layout, recomputed, step)
    allowed = (layout >= inner.group.least_layers) & (layout <= inner.max_recomputed)
    whole = allowed.all(axis=1) & (layout.sum(axis=1) == inner.layers)
    legal = inner.fits(result) & whole
    return Incumbents(
        np.where(legal, result.step_time_s, np.inf), np.where(legal, result.peak_memory_bytes, np.inf),
        layout, recomputed, step,
    )  # fmt: skip


def _layouts(inner: Inner, recomputed: IntArray, step: IntArray) -> Iterator[IntArray]:
    yield inner.group.batch.stage_layers
    if inner.group.free:
        if inner.group.vpp > 1:
            yield _ends_relieved(inner, recomputed)
        if len(inner.totals) == 1:
            yield _filled(inner, recomputed, step)
        elif inner.group.vpp == 1:
            yield balanced(inner)


def _filled(inner: Inner, recomputed: IntArray, step: IntArray) -> IntArray:
    """(N, S) ranks filled to the least level that memory allows, each rank's layers spread over its chunks."""
    model, group = inner.model, inner.group
    caps = np.maximum(rank_caps(inner, None, recomputed, inner.fraction(step)), 0)
    ends = np.zeros((len(inner), group.pp))
    ends[:, 0] += model.first_time_s
    ends[:, -1] += model.last_time_s
    slope, again = model.layer_time_s[:, :1], model.recompute_time_s[:, :1]
    spread = (recomputed * group.vpp)[:, None]
    top = slope[:, 0] * (inner.layers + 1) + again[:, 0] * inner.layers + ends.max(axis=1)

    def most_at(level: FloatArray, rows: Any = slice(None)) -> IntArray:
        filled = held_recomputing(slope[rows], again[rows], spread[rows], ends[rows], level)
        return np.asarray(np.maximum(np.minimum(filled, caps[rows]), group.vpp))

    def enough(level: FloatArray, rows: IntArray) -> BoolArray:
        return np.asarray(most_at(level, rows).sum(axis=1) >= inner.layers)

    def following(level: FloatArray, rows: IntArray) -> FloatArray:
        return next_level(slope[rows], again[rows], spread[rows], ends[rows], most_at(level, rows), caps[rows])

    low = least_level(slope, ends_by_kind(inner, model.first_time_s, model.last_time_s), rank_kinds(inner),
                      inner.layers, group.vpp)  # fmt: skip
    level = least_where(low, np.maximum(top, low), enough, following)
    most = most_at(np.where(np.isfinite(level), level, top))
    reached = slope * most + again * np.minimum(most, spread) + ends
    return spread_over_chunks(_trimmed(most, reached, inner.layers, group.vpp), group.vpp)


def _trimmed(most: IntArray, reached: FloatArray, layers: int, least: int) -> IntArray:
    """Take surplus layers away: from the slowest ranks, the earlier (which hold more micro-batches) first."""
    held, surplus = most.copy(), most.sum(axis=1) - layers
    cost = reached.copy()
    per_layer = reached / np.maximum(most, 1)
    rows = np.arange(len(held))
    for _ in range(int(surplus.max(initial=0))):
        movable = np.where(
            held > least, np.round(cost / np.maximum(cost.max(axis=1, keepdims=True), 1e-300), 9), -np.inf
        )
        worst = movable.argmax(axis=1)
        take = (surplus > 0) & (held[rows, worst] > least)
        held[rows, worst] -= take
        cost[rows, worst] -= np.where(take, per_layer[rows, worst], 0.0)
        surplus = surplus - take
    return held


def spread_over_chunks(ranks: IntArray, vpp: int) -> IntArray:
    """(N, P) layers of ranks to (N, P * vpp) layers of virtual stages, as equal as possible within a rank."""
    chunk = np.arange(vpp)[None, :, None]
    split = ranks[:, None, :] // vpp + (chunk < ranks[:, None, :] % vpp)
    return split.reshape(len(ranks), -1)


def _ends_relieved(inner: Inner, recomputed: IntArray) -> IntArray:
    """(N, S) full stages but for the missing layers: the longer end gives one up while it is longer than a full stage,
    then the earliest stages, whose ranks hold most activations."""
    model, full, rows = inner.model, inner.max_recomputed, np.arange(len(inner))
    layout = np.full((len(inner), inner.stages), full)
    ends = np.stack([model.first_time_s, model.last_time_s], axis=1)
    layer, again = model.layer_time_s[:, [0, -1]], model.recompute_time_s[:, [0, -1]]
    left, least = np.full(len(inner), inner.missing), inner.group.least_layers[[0, -1]]
    for _ in range(inner.missing):
        held, most = layout[:, [0, -1]], recomputed[:, None]
        less = (full - held) * layer + (np.minimum(most, full) - np.minimum(most, held)) * again
        over = np.where(held > least, ends - less, -np.inf)
        end, gives = over.argmax(axis=1), over.max(axis=1) > 0
        layout[rows, np.where(end == 0, 0, -1)] -= gives
        left -= gives
    whole = layout == full
    return np.asarray(layout - (whole & (whole.cumsum(axis=1) <= left[:, None])))


def balanced(inner: Inner) -> IntArray:
    """(N, S) contiguous stages that end where the accumulated time comes closest to their share, ends included."""
    model, stages, layers = inner.model, inner.stages, inner.layers
    one_hot = np.diff(inner.kind_prefix, axis=0)
    times = model.layer_time_s @ one_hot.T
    passed = np.concatenate([np.zeros((len(inner), 1)), times.cumsum(axis=1)], axis=1) + model.first_time_s[:, None]
    total = passed[:, -1] + model.last_time_s
    targets = total[:, None] * np.arange(1, stages) / stages
    middles = (passed[:, 1:] + passed[:, :-1]) / 2
    cuts = (middles[:, None, :] < targets[:, :, None]).sum(axis=2)
    index = np.arange(1, stages)
    cuts = np.maximum.accumulate(np.maximum(cuts - index, 0), axis=1) + index
    cuts = np.minimum(cuts, layers - stages + index)
    edges = np.concatenate([np.zeros((len(cuts), 1)), cuts, np.full((len(cuts), 1), layers)], axis=1)
    return np.diff(edges, axis=1).astype(np.int64)
