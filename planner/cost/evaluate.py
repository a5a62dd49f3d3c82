"""The cost of strategies: the one entry that search, estimate, reference tests and accuracy use.

``stage_model`` gives the coefficients of candidates that share a pipeline shape; ``evaluate`` prices complete
strategies of any shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.context import CostContext, Work
from planner.cost.stage_model import StageModel, StageResult, assemble
from planner.cost.step import Step
from planner.specs.batch import BoolArray, FloatArray, IntArray, StrategyBatch

__all__ = ["CostContext", "Evaluation", "evaluate", "fits", "layer_counts", "recomputed_counts", "stage_model"]


@dataclass(frozen=True)
class Evaluation:
    """Prices of N strategies; arrays of length N."""

    step_time_s: FloatArray
    peak_memory_bytes: FloatArray
    host_memory_bytes_per_node: FloatArray
    fits: BoolArray


def stage_model(context: CostContext, batch: StrategyBatch) -> StageModel:
    """Coefficients of candidates that all have the same pp."""
    return Step(Work(context, batch), int(batch.pp[0])).model


def layer_counts(context: CostContext, batch: StrategyBatch) -> IntArray:
    """(N, V, P, K) layers of each kind in each chunk of each pipeline rank; virtual stage k is chunk k div P of rank
    k mod P."""
    return _by_chunk(stage_counts(context, batch), batch)


def recomputed_counts(context: CostContext, batch: StrategyBatch) -> IntArray:
    """(N, V, P, K) layers of each kind that recompute."""
    return _by_chunk(stage_recomputed(context, batch), batch)


def stage_recomputed(context: CostContext, batch: StrategyBatch) -> IntArray:
    """(N, S, K) layers of each kind that recompute: the first ``recompute_layers`` of every virtual stage."""
    none = np.array([choice.mode == "none" for choice in context.recompute_kinds])[batch.recompute_kind]
    width = int(batch.pp[0] * batch.vpp[0])
    layers = batch.stage_layers[:, :width]
    starts = np.cumsum(layers, axis=1) - layers
    taken = np.where(none[:, None], 0, np.minimum(layers, batch.recompute_layers[:, None]))
    return np.asarray(context.kind_prefix[starts + taken] - context.kind_prefix[starts])


def stage_counts(context: CostContext, batch: StrategyBatch) -> IntArray:
    """(N, S, K) layers of each kind in each virtual stage."""
    width = int(batch.pp[0] * batch.vpp[0])
    ends = np.cumsum(batch.stage_layers[:, :width], axis=1)
    starts = ends - batch.stage_layers[:, :width]
    return np.asarray(context.kind_prefix[ends] - context.kind_prefix[starts])


def _by_chunk(counts: IntArray, batch: StrategyBatch) -> IntArray:
    """(N, S, K) to (N, V, P, K): the chunks of a rank are P stages apart."""
    pp, vpp = int(batch.pp[0]), int(batch.vpp[0])
    return np.asarray(counts.reshape(len(batch), vpp, pp, counts.shape[2]))


def fits(context: CostContext, result: StageResult) -> BoolArray:
    """The upper end of the memory range is within the GPU's limit, and host memory within the node's."""
    device = result.peak_memory_bytes * context.memory_upper <= context.memory_limit_bytes
    return np.asarray(device & (result.host_memory_bytes_per_node <= context.host_memory_limit_bytes))


def evaluate(context: CostContext, batch: StrategyBatch) -> Evaluation:
    """Step time and memory of complete strategies, in any mixture of pipeline shapes."""
    step, memory, host = (np.zeros(len(batch)) for _ in range(3))
    fit = np.zeros(len(batch), dtype=bool)
    shape = batch.pp * 100_000 + batch.vpp
    for code in np.unique(shape):
        rows = np.flatnonzero(shape == code)
        part = batch if len(rows) == len(batch) else batch.take(rows)
        result = assemble(
            stage_model(context, part),
            layer_counts(context, part),
            recomputed_counts(context, part),
            part.offload_optimizer,
        )
        step[rows], memory[rows] = result.step_time_s, result.peak_memory_bytes
        host[rows], fit[rows] = result.host_memory_bytes_per_node, fits(context, result)
    return Evaluation(step, memory, host, fit)
