"""What a record says about how its software lays out memory: number formats of the states, the loss, dropout.

Sources say it in three ways: Megatron's command-line arguments (``extra.args``), the settings of a recipe
(``extra.recipe_settings``) and single fields; what they leave open stays as the framework does it by default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.backends.base import Backend, StateFormat
from planner.backends.megatron import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    Megatron,
    loss_bytes,
    native_loss_bytes,
    unfused_loss_bytes,
)
from planner.specs.job import Precision
from planner.specs.measurement import MeasuredConfiguration

_MOMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp32": 4.0}
_FRACTION = re.compile(r"fraction ([\d.]+)")


def memory_habits(run: MeasuredConfiguration, stack: Backend, precision: Precision) -> dict[str, Any]:
    """Changes to the stack's habits, of the Megatron family only: others state nothing of the kind."""
    if not isinstance(stack, Megatron):
        return {}
    changes: dict[str, Any] = {}
    arguments = run.extra.get("args")
    if isinstance(arguments, Mapping):
        changes |= _by_arguments(arguments)
    stored = _state_format(run, precision)
    if stored is not None:
        changes["state_format"] = stored
    return changes


def offloaded_share(run: MeasuredConfiguration) -> float:
    """Share of the optimizer states in host memory: "optimizer to CPU, fraction 0.25"; all of them without a
    number."""
    words = (run.offload or "").lower()
    if "optimizer" not in words:
        return 0.0
    found = _FRACTION.search(words)
    return min(float(found[1]), 1.0) if found else 1.0


def optimizer_instances(run: MeasuredConfiguration) -> int:
    """Groups of replicas that each hold the whole optimizer (Megatron's partial distributed optimizer)."""
    arguments = run.extra.get("args") or {}
    return max(int(arguments.get("num-distributed-optimizer-instances") or 1), 1)


def _by_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's own defaults where an argument is absent: unfused loss, dropout 0.1, fused accumulation."""
    loss = unfused_loss_bytes
    if arguments.get("cross-entropy-loss-fusion"):
        loss = loss_bytes if arguments.get("cross-entropy-fusion-impl") == "te" else native_loss_bytes
    group = arguments.get("microbatch-group-size-per-virtual-pipeline-stage")
    return {
        "deterministic": bool(arguments.get("deterministic-mode")),
        "transformer_engine": arguments.get("transformer-impl") != "local",
        "interleaving_group": int(group) if group else None,
        "loss_bytes_per_logit": loss,
        "dropout": float(arguments.get("hidden-dropout", 0.1)) > 0,
        "fused_gradient_accumulation": not arguments.get("no-gradient-accumulation-fusion", False),
    }


def _state_format(run: MeasuredConfiguration, precision: Precision) -> StateFormat | None:
    """Bytes per parameter where the record states a number format other than the default."""
    said = _stated(run)
    if not any(said.values()):
        return None
    weights, gradients, optimizer = WEIGHT_BYTES[precision], GRADIENT_BYTES[precision], OPTIMIZER_BYTES[precision]
    if said["narrow gather"]:
        # Only the two 8-bit copies are kept, not the 16-bit weight.
        weights = 2.0
    if said["gradients"] in ("bf16", "fp16"):
        gradients = 2.0
    if said["moments"] or said["remainders"]:
        # A bf16 weight and the 16 bits that it lacks make up the fp32 master weight.
        master = 2.0 if said["remainders"] else 4.0
        optimizer = master + 2.0 * _MOMENT_BYTES[said["moments"] or "fp32"]
    return StateFormat(weights, gradients, optimizer)


def _stated(run: MeasuredConfiguration) -> dict[str, str]:
    """Number formats by the names of all three kinds of source, empty where nothing is said."""
    extra = run.extra
    arguments, recipe = extra.get("args") or {}, extra.get("recipe_settings") or {}
    reduced = str(recipe.get("ddp.grad_reduce_in_fp32")) == "False" or arguments.get("grad-reduce-in-bf16")
    moments = recipe.get("optimizer.exp_avg_dtype") or arguments.get("exp-avg-dtype") or extra.get("optimizer_moments")
    aware = recipe.get("optimizer.use_precision_aware_optimizer") or extra.get("precision_aware_optimizer")
    gather = arguments.get("fp8-param-gather") or extra.get("fp8_param_gather")
    return {
        "gradients": "bf16" if reduced else _dtype(extra.get("main_grads")),
        "moments": _dtype(moments) if _dtype(moments) != "fp32" else "",
        "remainders": "yes" if str(aware) == "True" else "",
        "narrow gather": "yes" if str(gather) == "True" else "",
    }


def _dtype(value: object) -> str:
    """A number format as torch or a source spells it."""
    words = str(value or "").lower().removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "fp8"}.get(
        words, words if words in _MOMENT_BYTES else ""
    )
