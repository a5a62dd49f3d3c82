"""The legal candidate of a backend that is most like a given strategy: what to run where the strategy itself cannot be.

Likeness counts doublings of degrees; among equally like candidates the fastest that fits is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from planner.cost.context import CostContext
from planner.cost.evaluate import evaluate
from planner.search.outcome import Pin
from planner.search.space import Group, enumerate_space
from planner.specs.batch import DEVICES, SCHEDULES, FloatArray, StrategyBatch
from planner.specs.strategy import Strategy

CHUNK = 200
"""Candidates, before recomputation and offload, that are looked at in full at a time: the nearest first."""

_DEGREES: tuple[tuple[str, float], ...] = (
    ("tp", 1.0), ("pp", 1.0), ("cp", 1.0), ("ep", 1.0), ("vpp", 0.3), ("etp", 0.3), ("shard_degree", 0.2),
    ("micro_batch", 0.5),
)  # fmt: skip
"""(column, weight of one doubling): a mesh matters more than how it is filled."""


def nearest(context: CostContext, strategy: Strategy, pins: Mapping[str, Pin] | None = None) -> StrategyBatch | None:
    """One row, legal for the backend of ``context``; None where the backend has no candidate that fits.

    Raises InputError for pins that leave nothing."""
    space = enumerate_space(context, pins or {})
    distances = [_distance(core.batch, strategy) for core in space.cores]
    ranked = np.sort(np.concatenate(distances)) if distances else np.zeros(0)
    below = -np.inf
    found: list[tuple[float, float, StrategyBatch]] = []
    for limit in dict.fromkeys(ranked[CHUNK - 1 :: CHUNK].tolist() + ranked[-1:].tolist()):
        for core, far in zip(space.cores, distances, strict=True):
            chosen = (far > below) & (far <= limit)
            if chosen.any():
                found += _nearest_fitting(context, space.variants(core.take(chosen)), strategy)
        # Recomputation and offload only add to the distance of what is left.
        if found and min(found, key=lambda each: each[:2])[0] <= limit:
            break
        below = limit
    return min(found, key=lambda each: each[:2])[2] if found else None


def _nearest_fitting(
    context: CostContext, group: Group, strategy: Strategy
) -> Iterator[tuple[float, float, StrategyBatch]]:
    """The candidate of a group that fits and is nearest, with its distance and its step time; at most one."""
    if not len(group):
        return
    priced = evaluate(context, group.batch)
    far = np.round(_distance(group.batch, strategy) + _saver_distance(context, group.batch, strategy), 6)
    order = np.lexsort((priced.step_time_s, far))
    fitting = order[priced.fits[order]]
    if len(fitting):
        first = int(fitting[0])
        yield float(far[first]), float(priced.step_time_s[first]), group.batch.take(np.array([first]))


def _distance(batch: StrategyBatch, strategy: Strategy) -> FloatArray:
    far: FloatArray = np.zeros(len(batch))
    for name, weight in _DEGREES:
        wanted = max(int(getattr(strategy, name)), 1)
        far = far + weight * np.abs(np.log2(np.maximum(getattr(batch, name), 1) / wanted))
    far = far + 0.5 * np.abs(batch.zero_stage - strategy.zero_stage)
    far = far + 0.2 * (batch.schedule != SCHEDULES.index(strategy.pipeline_schedule))
    return np.asarray(far + 0.3 * (batch.sequence_parallel != strategy.sequence_parallel), dtype=np.float64)


def _saver_distance(context: CostContext, batch: StrategyBatch, strategy: Strategy) -> FloatArray:
    """Of recomputation and offload."""
    modes = np.array([kind.mode != strategy.recompute.mode for kind in context.recompute_kinds])
    share = np.abs(batch.offload_optimizer - strategy.offload.optimizer)
    weights = batch.offload_parameters != DEVICES.index(strategy.offload.parameters)
    return np.asarray(0.5 * modes[batch.recompute_kind] + share + 0.5 * weights, dtype=np.float64)
