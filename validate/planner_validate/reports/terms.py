"""The estimate's trees in the terms of a measurement: which part of the memory tree is which kind of tensor, and which
leaf of the time tree is compute, update, or waiting for which group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from planner.specs.plan import Breakdown, Estimate
from planner.specs.validation import GroupKind, MemoryTerm, RankResult

MEMORY_TERMS: Mapping[str, MemoryTerm | None] = {
    "weights": "weights",
    "gathered weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "recomputed layer": "activations",
    "final norm": "activations",
    "prediction blocks": "activations",
    "logits and loss": "buffers",
    "backward of one layer": "buffers",
    "buffers": "buffers",
    "optimizer temporaries": "buffers",
    "matrix library workspaces": None,
    "fragmentation": None,
    "context and communication buffers": None,
}
"""Parts of a phase in the estimate's memory tree by what they are to a measurement; None: beside the tensors."""
RESERVED = ("matrix library workspaces", "fragmentation")
"""What a caching allocator holds beyond the tensors."""

FORWARD_BACKWARD = "forward and backward"
OPTIMIZER = "optimizer"
BETWEEN = "between"
TIME_TERMS: Mapping[str, str] = {
    "optimizer": OPTIMIZER,
    "host optimizer": OPTIMIZER,
    "once a step": OPTIMIZER,
}
"""Children of the estimate's time tree that belong to the update (the gradient norm, which is once a step, is part of
it); everything else is forward and backward."""

TRAFFIC: Mapping[str, GroupKind] = {
    "tensor-parallel traffic": "tp",
    "embedding traffic": "tp",
    "head traffic": "tp",
    "logits traffic": "tp",
    "context-parallel traffic": "cp",
    "expert-parallel traffic": "ep",
    "parameter and gradient traffic": "dp",
    "exposed gradient traffic": "dp",
    "stage-to-stage traffic": "pp",
}
"""Leaves of the time tree that wait for a kind of group."""


def stage_of(estimate: Estimate, rank: RankResult | None) -> Breakdown:
    """The estimate's memory of a rank's pipeline stage; of the fullest stage where the rank is not known."""
    stages = estimate.memory.children
    index = None if rank is None else rank.coordinates.get("pp")
    if index is None or not 0 <= index < len(stages):
        return max(stages, key=lambda stage: stage.value)
    return stages[index]


def phase_of(stage: Breakdown) -> Breakdown:
    """The phase of a stage in which it holds most."""
    return max(stage.children, key=lambda phase: phase.value)


def predicted_memory(phase: Breakdown) -> dict[MemoryTerm, float]:
    """Bytes by term of a phase."""
    terms: dict[MemoryTerm, float] = dict.fromkeys(get_args(MemoryTerm), 0.0)
    for part in phase.children:
        term = MEMORY_TERMS[part.name]
        if term is not None:
            terms[term] += part.value
    return terms


def allocated(phase: Breakdown) -> float:
    """Bytes of the tensors of a phase."""
    return sum(predicted_memory(phase).values())


def reserved(phase: Breakdown) -> float:
    """Bytes that the allocator holds for them."""
    return allocated(phase) + sum(part.value for part in phase.children if part.name in RESERVED)


def predicted_times(tree: Breakdown) -> dict[str, float]:
    """Seconds of the two parts of a step."""
    parts = {FORWARD_BACKWARD: 0.0, OPTIMIZER: 0.0}
    for child in tree.children:
        parts[TIME_TERMS.get(child.name, FORWARD_BACKWARD)] += child.value
    return parts


def predicted_traffic(tree: Breakdown) -> dict[GroupKind, float]:
    """Seconds that a step waits for each kind of group, as far as they are not hidden."""
    waits: dict[GroupKind, float] = {}
    for node in leaves(tree):
        kind = TRAFFIC.get(node.name)
        if kind is not None and node.value:
            waits[kind] = waits.get(kind, 0.0) + node.value
    return waits


def leaves(tree: Breakdown) -> Iterable[Breakdown]:
    """The parts that have no parts."""
    if not tree.children:
        yield tree
    for child in tree.children:
        yield from leaves(child)


def traffic_name(kind: GroupKind) -> str:
    return f"of it {kind} traffic"
