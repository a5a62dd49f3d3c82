"""The software of a measured run: the stack that its framework names, with the features that the record states."""

from __future__ import annotations

from typing import Any

from planner.backends.base import Backend, NarrowRecipe
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
    changes: dict[str, Any] = {"narrow_recipe": _recipe(config.precision or "")}
    recipes = (config.framework or "").lower().startswith(("nemo", "megatron-bridge"))
    overlap = config.overlap.tp_comm
    if overlap is False or (overlap is None and stack.name == "megatron" and not recipes):
        changes["tensor_parallel_overlap"] = False
    return stack.with_habits(**changes), known


def _recipe(precision: str) -> NarrowRecipe | None:
    """Scaling recipe of an 8-bit run, from the words of its precision."""
    words = precision.lower()
    if "mxfp8" in words or "block" in words:
        return "block"
    if words.endswith("-cs"):
        return "tensor"
    return "delayed" if words.endswith("-ds") else None
