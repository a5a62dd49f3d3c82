"""Good decisions without a solver, for many candidates at once: layouts that fill the ranks up to the least level, with the
fewest recomputed layers and the smallest offloaded share that can do.

What is found is priced exactly, so it is always a valid plan; where it equals the bound, it is the optimum of its candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.search.bounds import Needs
from planner.search.capacity import rank_caps
from planner.search.inner import Inner
from planner.search.waterfill import held_recomputing, least_where
from planner.specs.batch import BoolArray, FloatArray, IntArray

MORE = (0, 1, 2)
"""Recomputed layers and offload steps beyond the fewest that are tried, besides the most."""


@dataclass(frozen=True)
class Incumbents:
    """The best decision found for each of N candidates; times are infinite where none was found."""

    step_time_s: FloatArray
    memory_bytes: FloatArray
    layout: IntArray
    """(N, S)"""
    recomputed: IntArray
    step: IntArray

    def better(self, other: Incumbents, minimise_memory: bool) -> Incumbents:
        """The better of two, candidate by candidate."""
        mine, theirs = (self.memory_bytes, other.memory_bytes) if minimise_memory else (self.step_time_s, other.step_time_s)
        tie = np.isclose(mine, theirs, rtol=1e-12, atol=0.0)
        second, third = (self.step_time_s, other.step_time_s) if minimise_memory else (self.memory_bytes, other.memory_bytes)
        keep = np.where(tie, second <= third, mine <= theirs)
        return Incumbents(
            np.where(keep, self.step_time_s, other.step_time_s),
            np.where(keep, self.memory_bytes, other.memory_bytes),
            np.where(keep[:, None], self.layout, other.layout),
            np.where(keep, self.recomputed, other.recomputed),
            np.where(keep, self.step, other.step),
        )


def construct(inner: Inner, needs: Needs, *, minimise_memory: bool = False) -> Incumbents:
    """Try a few decisions on every candidate and keep the best that fits."""
    best: Incumbents | None = None
    for recomputed, step in _choices(inner, needs):
        for layout in _layouts(inner, recomputed, step):
            tried = _priced(inner, layout, recomputed, step)
            best = tried if best is None else best.better(tried, minimise_memory)
    if best is None:
        raise RuntimeError("there is always at least one choice to try")
    return best


def _choices(inner: Inner, needs: Needs) -> Iterator[tuple[IntArray, IntArray]]:
    """Pairs of recomputed layers and offload steps, fewest first."""
    most = np.where(inner.group.counted, inner.max_recomputed, 0)
    counts = [np.minimum(needs.recomputed + more, most) for more in MORE] + [most]
    steps = [np.minimum(needs.step + more, needs.most_steps) for more in MORE] + [needs.most_steps]
    for recomputed in counts if inner.group.counted.any() else counts[:1]:
        yield from ((recomputed, step) for step in (steps if (inner.group.steps > 1).any() else steps[:1]))


def _priced(inner: Inner, layout: IntArray, recomputed: IntArray, step: IntArray) -> Incumbents:
    result = inner.price(np.arange(len(inner)), layout, recomputed, step)
    legal = inner.fits(result) & (layout >= 1).all(axis=1) & (layout.sum(axis=1) == inner.layers)
    return Incumbents(
        np.where(legal, result.step_time_s, np.inf), np.where(legal, result.peak_memory_bytes, np.inf),
        layout, recomputed, step,
    )  # fmt: skip


def _layouts(inner: Inner, recomputed: IntArray, step: IntArray) -> Iterator[IntArray]:
    yield inner.group.batch.stage_layers
    if inner.group.free:
        if len(inner.totals) == 1:
            yield _filled(inner, recomputed, step)
        else:
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

    def most_at(level: FloatArray) -> IntArray:
        return np.maximum(np.minimum(held_recomputing(slope, again, spread, ends, level), caps), group.vpp)

    def enough(level: FloatArray) -> BoolArray:
        return np.asarray(most_at(level).sum(axis=1) >= inner.layers)

    level = least_where(np.zeros(len(inner)), top, enough)
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
        movable = np.where(held > least, np.round(cost / np.maximum(cost.max(axis=1, keepdims=True), 1e-300), 9), -np.inf)
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
