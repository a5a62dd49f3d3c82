"""Many strategies as parallel arrays: what rules test, the cost model evaluates and the search enumerates.

Row i of every array is one candidate; a single strategy is a batch of one, so nothing has a second implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.specs.strategy import Schedule

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

SCHEDULES: tuple[Schedule, ...] = ("none", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
"""``StrategyBatch.schedule`` holds indices into this tuple."""

DEVICES = ("none", "cpu", "nvme")
"""``StrategyBatch.offload_parameters`` and ``offload_device`` hold indices into this tuple."""

EVERY_LAYER = 1 << 14
"""``recompute_layers`` value that means all layers of every stage."""


@dataclass(frozen=True)
class StrategyBatch:
    """N candidates of one backend.  All arrays have length N except ``stage_layers`` (N, S)."""

    tp: IntArray
    sequence_parallel: BoolArray
    cp: IntArray
    pp: IntArray
    vpp: IntArray
    schedule: IntArray
    ep: IntArray
    etp: IntArray
    dp: IntArray
    zero_stage: IntArray
    shard_degree: IntArray
    secondary_shard_degree: IntArray
    """0 where there is no second shard."""
    micro_batch: IntArray
    recompute_kind: IntArray
    """Index into the backend's recompute kinds for this model."""
    recompute_layers: IntArray
    """Recomputed layers of each virtual stage, at most; a stage with fewer layers recomputes all of them."""
    offload_optimizer: FloatArray
    offload_device: IntArray
    offload_parameters: IntArray
    stage_layers: IntArray
    """(N, S) layers of the virtual stages in model order, zero-padded; S = max(pp * vpp)."""

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Any) -> StrategyBatch:
        """The candidates at ``rows`` (indices, slice or mask), in that order."""
        return StrategyBatch(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def with_values(self, **changes: Any) -> StrategyBatch:
        """A copy with whole columns replaced; scalars are broadcast to all rows."""
        columns = {
            name: np.broadcast_to(np.asarray(value, dtype=getattr(self, name).dtype), getattr(self, name).shape)
            if np.ndim(value) == 0
            else np.asarray(value, dtype=getattr(self, name).dtype)
            for name, value in changes.items()
        }
        return replace(self, **columns)

    def grad_accum(self, global_batch: int) -> IntArray:
        """Micro-batches of one step on one data-parallel replica (floor; a rule demands divisibility)."""
        return np.asarray(np.maximum(global_batch // (self.micro_batch * self.dp), 1))

    @classmethod
    def concatenate(cls, batches: Sequence[StrategyBatch]) -> StrategyBatch:
        """All candidates of several batches; ``stage_layers`` is padded to the widest."""
        width = max((batch.stage_layers.shape[1] for batch in batches), default=0)
        columns: dict[str, Any] = {}
        for field in fields(cls):
            parts = [getattr(batch, field.name) for batch in batches]
            if field.name == "stage_layers":
                parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
            columns[field.name] = np.concatenate(parts)
        return cls(**columns)
