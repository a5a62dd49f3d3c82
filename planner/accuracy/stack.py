"""The software of a measured run: the stack that its framework names, with the features that the record states."""

from __future__ import annotations

from typing import Any

from planner.accuracy.expert_software import expert_habits
from planner.backends.base import Backend
from planner.backends.stacks import STACKS, stack_named
from planner.specs.cluster import Cluster
from planner.specs.measurement import MeasuredRun


def stack_of(run: MeasuredRun, cluster: Cluster) -> tuple[Backend, bool]:
    """The stack, and whether its framework is one of those that were measured."""
    config = run.run
    stack, known = stack_named(config.framework or "")
    if stack.name == "megatron" and config.zero == 3:
        stack = STACKS["megatron-fsdp"]
    if stack.name == "megatron" and config.flash_attention is False:
        stack = STACKS["megatron-2021"]
    if stack.name == "torchtitan" and config.extra.get("compile") not in (None, False):
        stack = STACKS["torchtitan-compiled"]
    changes: dict[str, Any] = {}
    recipes = (config.framework or "").lower().startswith(("nemo", "megatron-bridge"))
    overlap = config.overlap.tp_comm
    if overlap is False or (overlap is None and stack.name == "megatron" and not recipes):
        changes["tensor_parallel_overlap"] = False
    if overlap is None and run.model.moe is not None:
        # Performance recipes of mixtures leave it off: with experts the user buffers cover too little.
        changes["tensor_parallel_overlap"] = False
    if run.model.moe is not None:
        changes |= expert_habits(config, cluster)
    return (stack.with_habits(**changes) if changes else stack), known
