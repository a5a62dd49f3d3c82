"""Reads number format and recomputation of a measured run in the words that sources use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.accuracy.runs.skip import Skip
from planner.backends import megatron
from planner.backends.base import NONE, Backend, RecomputeKind, Tensor
from planner.backends.stacks import ACTIVATIONS_TO_HOST
from planner.specs.batch import EVERY_LAYER
from planner.specs.cluster import Cluster
from planner.specs.job import Precision
from planner.specs.measurement import MeasuredConfiguration
from planner.specs.model import ModelSpec
from planner.specs.numbers import number

_UNSCALED: dict[str, Precision] = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "fp32",
}
"""Formats without scaling factors, by the words that sources begin with."""


def precision_of(run: MeasuredConfiguration, cluster: Cluster) -> tuple[Precision, list[str]]:
    """The matrix format; 16 bits where nothing is said."""
    words = str(run.precision or run.extra.get("source_precision_label") or "").lower()
    default: Precision = "fp16" if cluster.accelerator.peak.bf16 is None else "bf16"
    if not words:
        return default, [f"precision {default} (not stated)"]
    if "fp4" in words:
        if cluster.accelerator.peak.fp4 is None:
            raise Skip("the GPU has no fp4 matrix rate")
        return "nvfp4", []
    if "fp8" in words:
        if cluster.accelerator.peak.fp8 is None:
            raise Skip("the GPU has no fp8 matrix rate")
        return "fp8", []
    for name, precision in _UNSCALED.items():
        if words.startswith(name):
            return precision, []
    raise Skip(f"unknown precision {words[:20]!r}")


_OFFLOADED: dict[str, tuple[Tensor, ...]] = {
    "attn_norm": ("norm_input",),
    "mlp_norm": ("norm_input",),
    "qkv_linear": ("norm_output", "latent"),
    "core_attn": ("qkv",),
    "attn_proj": ("attention_output",),
    "expert_fc1": ("router",),
    "moe_act": ("expert_up",),
    "fused_group_mlp": ("router", "expert_up", "expert_act"),
}
"""Saved tensors that offloading the inputs of one of Megatron's modules moves (fine_grained_activation_offload)."""


@dataclass(frozen=True)
class Recomputation:
    """A recompute kind and how many layers of a stage it covers."""

    kind: RecomputeKind
    layers: int = EVERY_LAYER


@dataclass(frozen=True)
class HostStates:
    """What of the states lives in host memory."""

    optimizer: float
    """Share of the optimizer states, updated there."""
    parameters: bool
    """Whether the weights come from there, too."""


def host_states_of(run: MeasuredConfiguration) -> HostStates:
    """Optimizer and weights in host memory, as the record's words have it.

    Gemini keeps optimizer states on the host unless a share of the free GPU memory is promised to them
    (gpu_margin_mem_ratio, 0 by default); its policies auto and const only bring the weights to the GPU."""
    words = (run.offload or "").lower()
    if not re.search(r"optimizer|gemini", words):
        return HostStates(0.0, parameters=False)
    stated = re.search(r"fraction ([\d.]+)", words)
    share = number(stated[1].rstrip(".")) if stated else 1.0
    if share is None or share > 1.0:
        raise Skip(f"unknown share of offloading {words[:40]!r}")
    return HostStates(share, parameters="params" in words)


def recomputations_of(run: MeasuredConfiguration, model: ModelSpec, stack: Backend) -> tuple[Recomputation, ...]:
    """What the record says, or every choice worth considering where it says nothing."""
    return tuple(_with_offload(choice, run) for choice in _recomputations(run, model, stack))


def _recomputations(run: MeasuredConfiguration, model: ModelSpec, stack: Backend) -> tuple[Recomputation, ...]:
    offered = {kind.id: kind for kind in stack.recompute_kinds(model, _job_like(run))}
    none = Recomputation(NONE)
    selective = next((kind for kind in offered.values() if kind.mode == "selective"), None)
    words = (run.recompute or "").strip().lower()
    offloaded = re.search(r"activations of (\d{1,9})\d* layers", run.offload or "")
    if offloaded is not None and words in ("", "none"):
        return (Recomputation(ACTIVATIONS_TO_HOST, min(int(offloaded[1]), model.layers)),)
    if not words:
        return _unstated(run, model, stack, offered)
    if "solver" in words:
        return tuple(Recomputation(kind) for kind in offered.values())
    if words.startswith("none"):
        return (none,)
    if words.startswith("full"):
        kind = offered.get("full", megatron.FULL) if stack.name == "pytorch" else megatron.FULL
        return (Recomputation(kind, _covered(words, model, run)),)
    if words.startswith("modules:"):
        names = [name.strip() for name in words.removeprefix("modules:").split(",")]
        if names == ["solver-chosen"] and selective is not None:
            # A solver that trades memory for time lands between none and full, as the per-operator policy does.
            return (Recomputation(selective),)
        return (Recomputation(megatron.joined_kind(names, model)),)
    if words.startswith("selective"):
        if not isinstance(stack, megatron.Megatron) and selective is not None:
            return (Recomputation(selective),)
        return (Recomputation(megatron.CORE_ATTENTION),)
    raise Skip(f"unknown recomputation {words[:30]!r}")


def _unstated(
    run: MeasuredConfiguration, model: ModelSpec, stack: Backend, offered: Mapping[str, RecomputeKind]
) -> tuple[Recomputation, ...]:
    """Choices worth considering where a record says nothing of recomputation."""
    if not isinstance(stack, megatron.Megatron):
        return tuple(Recomputation(kind) for kind in offered.values())
    none, full = Recomputation(NONE), Recomputation(megatron.FULL)
    if stack.name == "megatron-fsdp":
        parts = [] if run.offload else [Recomputation(ACTIVATIONS_TO_HOST, layers) for layers in _quarters(model, run)]
        return (none, full, *parts)
    # NVIDIA's performance recipes for fine-tuning recompute nothing (Megatron-Bridge, scripts/performance/configs).
    if "full" not in offered or (tuned(run) and _fine_tuning(run)):
        return (none,)
    if model.moe is None and model.pattern is None:
        return (none, full)
    # Recipes of mixtures and hybrids pick selective modules; whole layers are the last resort.
    selected = (Recomputation(kind) for kind in offered.values() if kind.mode == "selective")
    return (none, *selected, full)


def tuned(run: MeasuredConfiguration) -> bool:
    """Whether the settings are those of a performance recipe rather than a library's defaults."""
    return run.extra.get("tuned") is not False


def _fine_tuning(run: MeasuredConfiguration) -> bool:
    return str(run.extra.get("task")) in ("sft", "lora")


def _quarters(model: ModelSpec, run: MeasuredConfiguration) -> list[int]:
    """A quarter, a half, three quarters and all layers of a stage."""
    stage = model.layers // ((run.pp or 1) * (run.vpp or 1))
    return sorted({max(1, stage * part // 4) for part in range(1, 5)})


def _with_offload(choice: Recomputation, run: MeasuredConfiguration) -> Recomputation:
    """The choice without the tensors of named modules that the run keeps in host memory ("fine-grained activations:
    expert_fc1")."""
    modules = re.findall(r"\w+", (run.offload or "").lower().partition("activations:")[2])
    gone = frozenset(tensor for name in modules for tensor in _OFFLOADED.get(name, ()))
    if not gone or choice.kind.mode == "full":
        return choice
    kind = choice.kind
    return replace(choice, kind=replace(kind, id=f"{kind.id}+offload", mode="selective", drops=kind.drops | gone))


def _covered(words: str, model: ModelSpec, run: MeasuredConfiguration) -> int:
    """Layers of a stage that "full:4-layers" or "full:every-2nd-layer" recomputes."""
    every = re.search(r"every-(\d{1,9})", words)
    stages = (run.pp or 1) * (run.vpp or 1)
    if every is not None:
        if not int(every[1]):
            raise Skip(f"unknown recomputation {words[:30]!r}")
        return max(1, round(model.layers / stages / int(every[1])))
    first = re.search(r"full:(\d{1,9})", words)
    return min(int(first[1]), model.layers) if first else EVERY_LAYER


def _job_like(run: MeasuredConfiguration):  # type: ignore[no-untyped-def]
    from planner.specs.job import Job

    return Job(seq_len=1, global_batch=1, flash_attention=run.flash_attention is not False)
