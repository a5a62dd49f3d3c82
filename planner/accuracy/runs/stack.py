"""The software of a measured run: the stack that its framework names, with the features that the record states."""

from __future__ import annotations

from typing import Any

from planner.accuracy.runs.expert_software import expert_habits
from planner.accuracy.runs.memory_layout import memory_habits
from planner.accuracy.runs.stated import settings
from planner.backends.base import Backend, NarrowRecipe
from planner.backends.megatron import Megatron
from planner.backends.nanotron import FUSED_NORM_BYTES
from planner.backends.stacks import STACKS, reduced_in_16_bits, stack_named
from planner.specs.cluster import Cluster
from planner.specs.job import Precision
from planner.specs.measurement import MeasuredConfiguration, MeasuredRun


def packed(config: MeasuredConfiguration) -> bool:
    """Whether sequences hold several samples, one packed behind the other."""
    return bool(settings(config, "features").get("sequence_packing"))


_KERNELS: dict[str, dict[str, Any]] = {
    "fused": {"score_kernel": "fused"},
    "flash_attentionv1.0.8": {"attention_kernel": "flash1"},
    "flash_attention2 + RMS kernel": {"norm_bytes": FUSED_NORM_BYTES},
}
"""What the kernels of a layout study replace, by the names of its sheets."""


def stack_of(run: MeasuredRun, cluster: Cluster, precision: Precision) -> tuple[Backend, bool]:
    """The stack, and whether its framework is one of those that were measured."""
    stack, known = _variant(run.run)
    changes = {
        "narrow_recipe": _recipe(run.run.precision or ""),
        **_tensor_parallel_overlap(run, stack),
        **_features(run.run, stack),
    }
    if run.model.moe is not None and isinstance(stack, Megatron):
        changes |= expert_habits(run.run, cluster, latent_attention=run.model.mla is not None)
    changes |= memory_habits(run.run, stack, precision)
    return stack.with_habits(**changes), known


def _variant(config: MeasuredConfiguration) -> tuple[Backend, bool]:
    """The stack that the framework's name, version and main switches mean."""
    stack, known = stack_named(config.framework or "")
    if "automodel" in (config.version or "").lower():
        stack = STACKS["automodel"]
    if stack.name == "megatron" and config.zero == 3:
        stack = STACKS["megatron-fsdp"]
    if stack.name == "megatron" and config.flash_attention is False:
        stack = STACKS["megatron-2021"]
    if stack.name == "torchtitan-eager" and config.extra.get("compile") not in (None, False):
        stack = STACKS[_compiled(config)]
    return stack, known


def _tensor_parallel_overlap(run: MeasuredRun, stack: Backend) -> dict[str, bool]:
    """Where it is stated, and what recipes do where it is not: NVIDIA's for dense models overlap; those of mixtures
    leave it off, for with experts the user buffers cover too little; Megatron-LM does not by itself."""
    stated = run.run.overlap.tp_comm
    recipes = (run.run.framework or "").lower().startswith(("nemo", "megatron-bridge"))
    if stated is True:
        return {"tensor_parallel_overlap": True} if stack.name.startswith("torchtitan") else {}
    if stated is False or (stack.name == "megatron" and not recipes):
        return {"tensor_parallel_overlap": False}
    mixture = run.model.moe is not None and isinstance(stack, Megatron)
    return {"tensor_parallel_overlap": False} if mixture else {}


def _features(config: MeasuredConfiguration, stack: Backend) -> dict[str, Any]:
    """Kernels and formats that a record names."""
    changes: dict[str, Any] = {}
    if packed(config):
        # Tuned recipes fuse the rotary kernel; the libraries' own defaults do not.
        changes["rotary_sample_by_sample"] = stack.name.startswith("megatron")
    if "deepep" in str(config.extra.get("ep_dispatch")).lower():
        changes["expert_dispatch"] = "flex"
    if str(config.extra.get("fsdp_mixed_precision")).upper() == "PURE":
        changes["gradient_reduce_bytes"] = reduced_in_16_bits
    if stack.name == "aleph-alpha":
        changes |= _KERNELS.get(str(config.extra.get("kernel") or ""), {})
    return changes


def _compiled(config: MeasuredConfiguration) -> str:
    """The compiled stack of a torchtitan run: tracing alone ("aot_fx_trace") leaves the kernels as they are."""
    if "trace" in str(config.extra["compile"]):
        return "torchtitan-traced"
    return "torchtitan-rowwise" if "rowwise" in str(config.extra.get("fp8")).lower() else "torchtitan-compiled"


def _recipe(precision: str) -> NarrowRecipe | None:
    """Scaling recipe of an 8-bit run, from the words of its precision."""
    words = precision.lower()
    if "mxfp8" in words or "block" in words:
        return "block"
    if words.endswith("-cs"):
        return "tensor"
    return "delayed" if words.endswith("-ds") else None
