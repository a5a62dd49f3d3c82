"""What a candidate can trade time for memory with: recomputation and offload, which are multiplied out last.

Only which choices exist; whether a framework allows them together is for its rules to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.backends.base import OffloadChoice, RecomputeKind
from planner.search.grid import expand
from planner.specs.batch import DEVICES, BoolArray, IntArray, StrategyBatch


@dataclass(frozen=True)
class Savers:
    """What can be traded for memory: recompute kinds and offloads, as far as the pins allow."""

    kinds: tuple[RecomputeKind, ...]
    recompute: tuple[tuple[int, int], ...]
    """(kind, recomputed layers)"""
    offloads: tuple[OffloadChoice | None, ...]
    """None is no offload."""

    def _options(self, stage: int) -> list[tuple[int, int, int, int, float]]:
        possible = [choice for choice in self.offloads if choice is None or stage in choice.zero_stages]
        rows = [
            (0, 0, 0.0) if c is None else (DEVICES.index(c.device), DEVICES.index(c.parameters), 1.0) for c in possible
        ]
        return [(*kind, *row) for kind in self.recompute for row in rows]

    def count(self, batch: StrategyBatch) -> int:
        """Variants of all rows together."""
        stages, rows = np.unique(batch.zero_stage, return_counts=True)
        return sum(int(n) * len(self._options(int(stage))) for stage, n in zip(stages, rows, strict=True))

    def expand(self, batch: StrategyBatch) -> StrategyBatch:
        """Every row with each of its options."""
        names = ("recompute_kind", "recompute_layers", "offload_device", "offload_parameters", "offload_optimizer")
        return expand(batch, names, ("zero_stage",), self._options)

    def open_choices(self, batch: StrategyBatch) -> tuple[BoolArray, IntArray]:
        """(counted, steps) of each candidate, as ``Group`` has them."""
        counted = np.array([kind.layer_count for kind in self.kinds])[batch.recompute_kind]
        steps = np.zeros(len(batch), dtype=np.int64)
        for choice in self.offloads:
            if choice is not None:
                same = (batch.offload_device == DEVICES.index(choice.device)) & (
                    batch.offload_parameters == DEVICES.index(choice.parameters)
                )
                steps[same & np.isin(batch.zero_stage, choice.zero_stages)] = choice.steps
        return counted, steps
