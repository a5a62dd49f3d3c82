"""The software of a measured run: the stack that its framework names, with the features that the record states."""

from __future__ import annotations

from typing import Any

from planner.accuracy.memory_layout import memory_habits
from planner.backends.base import Backend
from planner.backends.stacks import FUSED_NORM_BYTES, STACKS, stack_named
from planner.specs.job import Precision
from planner.specs.measurement import MeasuredRun

_KERNELS: dict[str, dict[str, Any]] = {
    "fused": {"score_kernel": "fused"},
    "flash_attentionv1.0.8": {"attention_kernel": "flash1"},
    "flash_attention2 + RMS kernel": {"norm_bytes": FUSED_NORM_BYTES},
}
"""What the kernels of a layout study replace, by the names of its sheets."""


def stack_of(run: MeasuredRun, precision: Precision) -> tuple[Backend, bool]:
    """The stack, and whether its framework is one of those that were measured."""
    config = run.run
    stack, known = stack_named(config.framework or "")
    if stack.name == "megatron" and config.zero == 3:
        stack = STACKS["megatron-fsdp"]
    if stack.name == "megatron" and config.flash_attention is False:
        stack = STACKS["megatron-2021"]
    if stack.name == "torchtitan" and config.extra.get("compile") not in (None, False):
        traced = "trace" in str(config.extra["compile"])
        stack = STACKS["torchtitan-traced" if traced else "torchtitan-compiled"]
    changes: dict[str, Any] = {}
    recipes = (config.framework or "").lower().startswith(("nemo", "megatron-bridge"))
    overlap = config.overlap.tp_comm
    if overlap is False or (overlap is None and stack.name == "megatron" and not recipes):
        changes["tensor_parallel_overlap"] = False
    if stack.name == "aleph-alpha":
        changes |= _KERNELS.get(str(config.extra.get("kernel") or ""), {})
    changes |= memory_habits(config, stack, precision)
    return (stack.with_habits(**changes) if changes else stack), known
