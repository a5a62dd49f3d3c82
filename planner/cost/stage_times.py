"""Seconds that every virtual stage takes for one micro-batch, forward and backward apart.

The same arrays that a step's time is made of, not added up over chunks and passes: what a pipeline's schedule is
simulated with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.context import CostContext, Work
from planner.cost.evaluate import stage_counts, stage_recomputed
from planner.cost.pipeline import WEIGHT_GRADIENT_SHARE
from planner.cost.step import Step
from planner.specs.batch import FloatArray, StrategyBatch


@dataclass(frozen=True)
class StageTimes:
    """Arrays of length S = pp * vpp in model order, without the share of waiting for the slowest GPU."""

    forward: FloatArray
    backward: FloatArray
    """Recomputation included."""

    @property
    def weight_gradients(self) -> FloatArray:
        """Of ``backward``, what schedules that take weight gradients apart can put off."""
        return np.minimum(WEIGHT_GRADIENT_SHARE * (self.forward + self.backward), self.backward)


def stage_times(context: CostContext, batch: StrategyBatch) -> StageTimes:
    """Stage times of a batch of one; summed over the chunks of a rank they are its time in ``assemble``."""
    if len(batch) != 1:
        raise ValueError(f"stage_times takes one strategy, got {len(batch)}")
    step = Step(Work(context, batch), int(batch.pp[0]))
    layers, again = stage_counts(context, batch)[0], stage_recomputed(context, batch)[0]
    forward = layers @ step.layer_forward_s[0]
    total = layers @ step.layer_time_s[0] + again @ step.recompute_time_s[0]
    for at, end, moved in ((0, step.first_time, step.first_traffic), (-1, step.last_time, step.last_traffic)):
        forward[at] += (end.forward() + moved.forward)[0]
        total[at] += (end.total() + moved.forward + moved.backward)[0]
    return StageTimes(forward, total - forward)
