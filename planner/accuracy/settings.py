"""Reads number format and recomputation of a measured run in the words that sources use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.accuracy.skip import Skip
from planner.backends import megatron
from planner.backends.base import Backend, RecomputeKind
from planner.specs.batch import EVERY_LAYER
from planner.specs.cluster import Cluster
from planner.specs.job import Precision
from planner.specs.measurement import MeasuredConfiguration
from planner.specs.model import ModelSpec

_SIXTEEN_BIT: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32"}


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
    for name, precision in _SIXTEEN_BIT.items():
        if words.startswith(name):
            return precision, []
    raise Skip(f"unknown precision {words[:20]!r}")


@dataclass(frozen=True)
class Recomputation:
    """A recompute kind and how many layers of a stage it covers."""

    kind: RecomputeKind
    layers: int = EVERY_LAYER


def recomputations_of(run: MeasuredConfiguration, model: ModelSpec, stack: Backend) -> tuple[Recomputation, ...]:
    """What the record says, or every choice worth considering where it says nothing."""
    offered = {kind.id: kind for kind in stack.recompute_kinds(model, _job_like(run))}
    none, full = Recomputation(megatron.NONE), Recomputation(megatron.FULL)
    selective = next((kind for kind in offered.values() if kind.mode == "selective"), None)
    words = (run.recompute or "").strip().lower()
    if not words:
        if model.moe is None and model.pattern is None:
            return (none, full)
        # Recipes of mixtures and hybrids pick selective modules; whole layers are the last resort.
        selected = (Recomputation(kind) for kind in offered.values() if kind.mode == "selective")
        return (none, *selected, full)
    if words.startswith("none"):
        return (none,)
    if words.startswith("full"):
        return (Recomputation(megatron.FULL, _covered(words, model, run)),)
    if words.startswith("modules:"):
        names = [name.strip() for name in words.removeprefix("modules:").split(",")]
        return (Recomputation(megatron.joined_kind(names, model)),)
    if words.startswith("selective"):
        if stack.name.startswith(("fsdp", "torchtitan")) and selective is not None:
            return (Recomputation(selective),)
        return (Recomputation(megatron.CORE_ATTENTION),)
    raise Skip(f"unknown recomputation {words[:30]!r}")


def _covered(words: str, model: ModelSpec, run: MeasuredConfiguration) -> int:
    """Layers of a stage that "full:4-layers" or "full:every-2nd-layer" recomputes."""
    every = re.search(r"every-(\d+)", words)
    stages = (run.pp or 1) * (run.vpp or 1)
    if every is not None:
        return max(1, round(model.layers / stages / int(every[1])))
    number = re.search(r"full:(\d+)", words)
    return int(number[1]) if number else EVERY_LAYER


def _job_like(run: MeasuredConfiguration):  # type: ignore[no-untyped-def]
    from planner.specs.job import Job

    return Job(seq_len=1, global_batch=1, flash_attention=run.flash_attention is not False)
