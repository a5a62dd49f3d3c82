"""What is decided within a candidate, and its coefficients prepared for that.

``Inner`` folds recomputation that is not open (every layer or none) into the layer coefficients, so that bounds,
constraint model and constructions see one form: N recomputed layers of each virtual stage, or nothing to count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from planner.cost.evaluate import CostContext, stage_model
from planner.cost.stage_model import StageModel, StageResult, assemble
from planner.search.space import Group, stage_cap
from planner.specs.batch import EVERY_LAYER, BoolArray, FloatArray, IntArray, StrategyBatch


@dataclass(frozen=True)
class Limits:
    """Bytes that the point estimate may reach."""

    gpu_bytes: float
    """Limit of the GPU over the upper factor of the memory range."""
    host_bytes: float
    """Per node."""

    @classmethod
    def of(cls, context: CostContext) -> Limits:
        return cls(context.memory_limit_bytes / context.memory_upper, context.host_memory_limit_bytes)


@dataclass(frozen=True)
class Inner:
    """N candidates of one group with folded coefficients."""

    group: Group
    model: StageModel
    """recompute_time_s and recompute_saved_bytes are zero where recomputation is not open."""
    kind_prefix: IntArray
    """(L + 1, K) layers of each kind among the first l."""
    limits: Limits

    def __len__(self) -> int:
        return len(self.model)

    @property
    def layers(self) -> int:
        return len(self.kind_prefix) - 1

    @property
    def totals(self) -> IntArray:
        """(K,) layers of each kind."""
        return np.asarray(self.kind_prefix[-1])

    @property
    def stages(self) -> int:
        return self.group.pp * self.group.vpp

    @property
    def max_recomputed(self) -> int:
        """The most layers that one virtual stage can hold, and so recompute."""
        return stage_cap(self.layers, self.group.pp, self.group.vpp) if self.group.free else self.layers

    @property
    def missing(self) -> int:
        """Layers by which the virtual stages together fall short of all being full; unlimited with one chunk a rank."""
        return self.stages * self.max_recomputed - self.layers

    @property
    def budget_bytes(self) -> FloatArray:
        """(N,) bytes that the allocator may hand out."""
        return (self.limits.gpu_bytes - self.model.device_overhead_bytes) / self.model.memory_factor

    def take(self, rows: Any) -> Inner:
        return replace(self, group=self.group.take(rows), model=take_rows(self.model, rows))

    def fraction(self, step: IntArray) -> FloatArray:
        """Offloaded share of each candidate at ``step`` (0 where nothing is offloaded)."""
        return step / np.maximum(self.group.steps, 1)

    def price(self, rows: IntArray, layouts: IntArray, recomputed: IntArray, step: IntArray) -> StageResult:
        """Decisions (R, S) layouts, (R,) recomputed layers, (R,) offload steps for the candidates ``rows``."""
        part = self.take(rows)
        layers, again = counts(self, layouts, np.where(part.group.counted, recomputed, 0))
        return assemble(part.model, layers, again, part.fraction(step))

    def fits(self, result: StageResult) -> BoolArray:
        return np.asarray(
            (result.peak_memory_bytes <= self.limits.gpu_bytes)
            & (result.host_memory_bytes_per_node <= self.limits.host_bytes)
        )

    def decided(self, row: int, layout: IntArray, recomputed: int, step: int) -> StrategyBatch:
        """The complete strategy of one candidate."""
        batch = self.group.batch.take([row])
        most = recomputed if self.group.counted[row] else int(batch.recompute_layers[0])
        if self.group.counted[row] and recomputed >= int(layout.max()):
            most = EVERY_LAYER
        share = step / int(self.group.steps[row]) if self.group.steps[row] else 0.0
        return batch.with_values(stage_layers=layout[None, :], recompute_layers=most, offload_optimizer=share)


def take_rows(model: StageModel, rows: Any) -> StageModel:
    """The candidates at ``rows``."""
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    return StageModel(**{name: value if name == "pp" else value[rows] for name, value in values.items()})


def counts(inner: Inner, layouts: IntArray, recomputed: IntArray) -> tuple[IntArray, IntArray]:
    """(R, V, P, K) layers and recomputed layers of (R, S) layouts; every stage recomputes its first (R,) layers."""
    prefix, group = inner.kind_prefix, inner.group
    ends = np.cumsum(layouts, axis=1)
    starts = ends - layouts
    first = starts + np.minimum(layouts, recomputed[:, None])
    shape = (len(layouts), group.vpp, group.pp, prefix.shape[1])
    return (prefix[ends] - prefix[starts]).reshape(shape), (prefix[first] - prefix[starts]).reshape(shape)


def prepare(context: CostContext, group: Group) -> Inner:
    """Coefficients of all candidates of a group, folded."""
    return fold(stage_model(context, group.batch), context, group)


def prepare_together(context: CostContext, groups: Sequence[Group]) -> Iterator[Inner]:
    """``prepare`` for several groups of one pipeline depth, priced in one go."""
    model = stage_model(context, StrategyBatch.concatenate([group.batch for group in groups]))
    start = 0
    for group in groups:
        rows = slice(start, start + len(group))
        yield fold(take_rows(model, rows), context, group)
        start = rows.stop


def fold(model: StageModel, context: CostContext, group: Group) -> Inner:
    """``model`` with recomputation that is not open made part of the layers."""
    none = np.array([kind.mode == "none" for kind in context.recompute_kinds])[group.batch.recompute_kind]
    always = (~none & ~group.counted)[:, None]
    is_open = (group.counted & ~none)[:, None]
    folded = replace(
        model,
        layer_time_s=model.layer_time_s + np.where(always, model.recompute_time_s, 0.0),
        layer_activation_bytes=model.layer_activation_bytes - np.where(always, model.recompute_saved_bytes, 0.0),
        recompute_time_s=np.where(is_open, model.recompute_time_s, 0.0),
        recompute_saved_bytes=np.where(is_open, model.recompute_saved_bytes, 0.0),
    )
    return Inner(group, folded, context.kind_prefix, Limits.of(context))
