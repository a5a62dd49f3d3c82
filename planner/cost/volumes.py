"""Bytes that one GPU sends in a step, by the kind of group it sends them to.

The exchanges and their sizes are those whose seconds make up a step; here they are asked for bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import pipeline
from planner.cost.collectives import SENT_BYTES, Group
from planner.cost.context import CostContext, Work
from planner.cost.ends import embedding_exchanges, head_exchanges
from planner.cost.evaluate import layer_counts, recomputed_counts
from planner.cost.layers import context_exchanges, expert_exchanges, repeated, tensor_parallel_bytes
from planner.cost.params import LayerKind
from planner.cost.sharding import LayerTraffic, sent_bytes
from planner.cost.step import Step
from planner.specs.batch import FloatArray, IntArray, StrategyBatch

TENSOR, CONTEXT, EXPERT = "tensor-parallel traffic", "context-parallel traffic", "expert-parallel traffic"


@dataclass(frozen=True)
class Volume:
    """What the busiest GPU sends in one step to its groups of one kind."""

    axis: str
    """tp, cp, ep, pp or dp; tp includes tensor parallelism inside experts, dp all copies and shards of weights."""
    groups: tuple[Group, ...]
    sent_bytes: float


def volumes(context: CostContext, batch: StrategyBatch) -> tuple[Volume, ...]:
    """Traffic of a batch of one, of all kinds of groups that have any; of pipeline ranks the one that sends most.

    Left out are exchanges of a few bytes: gradient norms, losses, and a tied table's gradients between its two
    copies."""
    if len(batch) != 1:
        raise ValueError(f"volumes takes one strategy, got {len(batch)}")
    step = Step(Work(context, batch), int(batch.pp[0]))
    layers, again = layer_counts(context, batch)[0].sum(axis=0), recomputed_counts(context, batch)[0].sum(axis=0)
    work, groups = step.work, step.groups
    m = float(work.micro_batches[0])
    inside = {name: m * float(_inside(step, name, layers, again).max()) for name in (TENSOR, CONTEXT, EXPERT)}
    mixture = context.model.moe is not None
    found = (
        Volume("tp", (groups.tensor, *([groups.expert_tensor] if mixture else [])), inside[TENSOR]),
        Volume("cp", (groups.context,), inside[CONTEXT]),
        Volume("ep", (groups.expert,), inside[EXPERT]),
        Volume("pp", (groups.pipeline,), float(pipeline.sent_bytes(work, groups)[0])),
        Volume("dp", (groups.data, *([groups.expert_data] if mixture else [])), float(_weights(step, layers, m).max())),
    )
    return tuple(volume for volume in found if volume.sent_bytes > 0.0)


def _inside(step: Step, name: str, layers: IntArray, again: IntArray) -> FloatArray:
    """(P,) bytes of one kind of exchange inside layers, for one micro-batch."""
    work = step.work
    kinds = work.context.kinds
    passes = {kind: _layer(step, kind, name) for kind in kinds}
    choice = work.context.recompute_kinds[int(work.batch.recompute_kind[0])]
    total = np.zeros(step.pp)
    for k, kind in enumerate(kinds):
        forward, backward = passes[kind]
        total += layers[:, k] * float((forward + backward)[0])
        if choice.mode != "none" and not choice.to_host:
            total += again[:, k] * float(repeated(work, kind, {name: forward}, {name}, choice)[0])
    total[-1] += work.context.model.mtp_layers * sum(
        float((passes[kind][0] + passes[kind][1])[0]) for kind in work.context.model.prediction_kinds()
    )
    if name == TENSOR:
        first = embedding_exchanges(work, step.groups, SENT_BYTES)
        last = head_exchanges(work, step.groups, step.ends.vocab, SENT_BYTES)
        total[0] += float((first[0] + first[1])[0])
        total[-1] += float((last[0] + last[1])[0])
    return total


def _layer(step: Step, kind: LayerKind, name: str) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) bytes of one layer."""
    if name == CONTEXT:
        return context_exchanges(step.work, step.groups, kind, SENT_BYTES)
    if name == TENSOR:
        each = tensor_parallel_bytes(step.work, step.groups, kind)
    else:
        each = expert_exchanges(step.work, step.groups, kind, SENT_BYTES)
    return each, each


def _weights(step: Step, layers: IntArray, m: float) -> FloatArray:
    """(P,) bytes of gradients and parameters in a step of ``m`` micro-batches."""

    def of_step(moved: LayerTraffic) -> float:
        return float((moved.once + m * (moved.forward + moved.backward))[0])

    per_layer = np.array([of_step(sent_bytes(step.work, step.groups, weights)) for weights in step.weights])
    total: FloatArray = layers @ per_layer
    total[0] += of_step(sent_bytes(step.work, step.groups, step.ends.first))
    total[-1] += of_step(sent_bytes(step.work, step.groups, step.ends.last))
    return total
