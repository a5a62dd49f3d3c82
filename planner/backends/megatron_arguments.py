"""What Megatron-LM's command-line arguments decide of memory and kernels: number formats, loss, dropout, fusions.

Works on a mapping of hyphenated argument names without dashes to values (switches are True); measured runs and
configurations that are read go through the same functions.  Defaults where an argument is absent are those of
megatron/training/arguments.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from planner.backends.base import NarrowRecipe, StateFormat
from planner.backends.megatron import (
    GRADIENT_BYTES,
    MASTER_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    native_loss_bytes,
    te_loss_bytes,
)
from planner.specs.job import Job, Precision
from planner.specs.numbers import degree, number

Arguments = Mapping[str, Any]

MOMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp32": 4.0}
"""Formats that --exp-avg-dtype and its relatives take, and their bytes."""

_RECIPES: dict[str, NarrowRecipe] = {
    "tensorwise": "tensor",
    "delayed": "delayed",
    "mxfp8": "block",
    "blockwise": "block",
}


def optimizer_instances(arguments: Arguments) -> int:
    """Groups of replicas that each hold the whole optimizer (Megatron's partial distributed optimizer)."""
    return degree(arguments.get("num-distributed-optimizer-instances")) or 1


def loss_function(arguments: Arguments) -> Callable[[Job], float] | None:
    """Bytes per logit of the fused loss that the arguments ask for; None where they ask for none."""
    if not arguments.get("cross-entropy-loss-fusion"):
        return None
    return te_loss_bytes if arguments.get("cross-entropy-fusion-impl") == "te" else native_loss_bytes


def kernel_habits(arguments: Arguments) -> dict[str, Any]:
    """Habits by Megatron-LM's own defaults where an argument is absent: dropout 0.1, fused accumulation."""
    backend = arguments.get("attention-backend")
    dropout = number(arguments.get("hidden-dropout"))
    return {
        "deterministic": bool(arguments.get("deterministic-mode")),
        "transformer_engine": arguments.get("transformer-impl") != "local",
        "attention_backend": backend if backend in ("flash", "fused", "unfused") else "auto",
        "fused_activation": not arguments.get("no-bias-gelu-fusion", False),
        "interleaving_group": degree(arguments.get("microbatch-group-size-per-virtual-pipeline-stage")),
        "dropout": dropout is None or dropout > 0,
        "fused_gradient_accumulation": not arguments.get("no-gradient-accumulation-fusion", False),
    }


def expert_habits(arguments: Arguments) -> dict[str, Any]:
    """How a mixture of experts runs; the all-to-all is taken for the default all-gather dispatcher, too."""
    capacity = arguments.get("moe-expert-capacity-factor") is not None
    return {
        "expert_dispatch": "flex" if arguments.get("moe-token-dispatcher-type") == "flex" else "all-to-all",
        "expert_overlap": bool(arguments.get("overlap-moe-expert-parallel-comm")),
        "padded_experts": capacity and bool(arguments.get("moe-pad-expert-input-to-capacity")),
    }


def graphs_of(arguments: Arguments) -> Literal["none", "partial", "full"]:
    """What runs as CUDA graphs (--cuda-graph-impl, and its two older spellings)."""
    chosen = arguments.get("cuda-graph-impl") or "none"
    if chosen == "full_iteration" or "full_iteration" in _items(arguments.get("cuda-graph-scope")):
        return "full"
    older = arguments.get("enable-cuda-graph") or arguments.get("external-cuda-graph")
    return "partial" if chosen != "none" or older else "none"


def _items(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def narrow_recipe(arguments: Arguments) -> NarrowRecipe | None:
    """Scaling of 8-bit matrices; Megatron's default is delayed scaling.  None without fp8."""
    if not (arguments.get("fp8-format") or arguments.get("fp8-hybrid") or arguments.get("fp8-e4m3")):
        return None
    return _RECIPES.get(str(arguments.get("fp8-recipe") or "delayed"))


def narrow_gradients(arguments: Arguments) -> bool:
    """Whether gradients are kept and reduced in 16 bits."""
    return bool(arguments.get("grad-reduce-in-bf16")) or dtype(arguments.get("main-grads-dtype")) == "bf16"


def state_format(
    precision: Precision, *, gradients_in_16_bits: bool, moments: object = None, gathers_8_bits: object = None
) -> StateFormat | None:
    """Bytes per parameter where gradients, moments or weights have another format than Megatron-LM's default.

    ``moments`` is the format of both moments as torch or the arguments spell it; with 8-bit gathering
    (--fp8-param-gather) only the two 8-bit copies of a weight are kept, not its 16-bit form."""
    default = (WEIGHT_BYTES[precision], GRADIENT_BYTES[precision], OPTIMIZER_BYTES[precision])
    weights, gradients, optimizer = default
    if gradients_in_16_bits:
        gradients = 2.0
    if dtype(moments) and precision != "fp32":
        optimizer = MASTER_BYTES + 2.0 * MOMENT_BYTES[dtype(moments)]
    if gathers_8_bits is True:
        weights = 2.0
    changed = (weights, gradients, optimizer) != default
    return StateFormat(weights, gradients, optimizer) if changed else None


def dtype(value: object) -> str:
    """A number format as torch or a source spells it, in short; empty where it is none."""
    words = str(value or "").lower().removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "fp8"}.get(
        words, words if words in MOMENT_BYTES else ""
    )
