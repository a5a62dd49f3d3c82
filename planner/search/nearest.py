"""The legal candidate of a backend that is most like a given strategy: what to run where the strategy itself cannot be.

Likeness counts doublings of degrees; among equally like candidates the fastest that fits is taken."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.cost.context import CostContext
from planner.cost.evaluate import evaluate
from planner.search.outcome import Pin
from planner.search.space import Group, enumerate_space
from planner.specs.batch import DEVICES, FloatArray, StrategyBatch
from planner.specs.strategy import Strategy

NEAREST_CORES = 200
"""Candidates, before recomputation and offload, that are looked at in full."""

_DEGREES: tuple[tuple[str, float], ...] = (
    ("tp", 1.0), ("pp", 1.0), ("cp", 1.0), ("ep", 1.0), ("vpp", 0.3), ("etp", 0.3), ("shard_degree", 0.2),
    ("micro_batch", 0.5),
)  # fmt: skip
"""(column, weight of one doubling): a mesh matters more than how it is filled."""


def nearest(context: CostContext, strategy: Strategy, pins: Mapping[str, Pin] | None = None) -> StrategyBatch | None:
    """One row, legal for the backend of ``context``; None where the backend has no candidate that fits.

    Raises InputError for pins that leave nothing."""
    best: tuple[float, float] | None = None
    row: StrategyBatch | None = None
    space = enumerate_space(context, pins or {})
    for core in _closest(space.cores, strategy):
        variants = space.variants(core)
        if not len(variants):
            continue
        priced = evaluate(context, variants.batch)
        far = _distance(variants.batch, strategy) + _saver_distance(context, variants.batch, strategy)
        for index in np.lexsort((priced.step_time_s, far)).tolist():
            rank = (round(float(far[index]), 6), float(priced.step_time_s[index]))
            if best is not None and rank >= best:
                break
            if priced.fits[index]:
                best, row = rank, variants.batch.take(np.array([index]))
                break
    return row


def _closest(cores: tuple[Group, ...], strategy: Strategy) -> list[Group]:
    """The cores with the smallest distances, group by group."""
    distances = [_distance(core.batch, strategy) for core in cores]
    if not distances:
        return []
    everything = np.sort(np.concatenate(distances))
    limit = everything[min(NEAREST_CORES, len(everything)) - 1]
    return [core.take(far <= limit) for core, far in zip(cores, distances, strict=True) if (far <= limit).any()]


def _distance(batch: StrategyBatch, strategy: Strategy) -> FloatArray:
    far: FloatArray = np.zeros(len(batch))
    for name, weight in _DEGREES:
        wanted = max(int(getattr(strategy, name)), 1)
        far = far + weight * np.abs(np.log2(np.maximum(getattr(batch, name), 1) / wanted))
    far = far + 0.5 * np.abs(batch.zero_stage - strategy.zero_stage)
    return np.asarray(far + 0.3 * (batch.sequence_parallel != strategy.sequence_parallel), dtype=np.float64)


def _saver_distance(context: CostContext, batch: StrategyBatch, strategy: Strategy) -> FloatArray:
    """Of recomputation and offload."""
    modes = np.array([kind.mode != strategy.recompute.mode for kind in context.recompute_kinds])
    share = np.abs(batch.offload_optimizer - strategy.offload.optimizer)
    weights = batch.offload_parameters != DEVICES.index(strategy.offload.parameters)
    return np.asarray(0.5 * modes[batch.recompute_kind] + share + 0.5 * weights, dtype=np.float64)
