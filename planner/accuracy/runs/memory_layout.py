"""What a record says about how its software lays out memory: number formats of the states, the loss, dropout.

Sources say it in three ways: Megatron's command-line arguments (``extra.args``), the settings of a recipe
(``extra.recipe_settings``) and single fields; what they leave open is as the framework does it by default, and NeMo
and Megatron-Bridge have other defaults than Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.accuracy.runs.stated import settings
from planner.backends import megatron_arguments
from planner.backends.base import Backend, StateFormat
from planner.backends.megatron import native_loss_bytes, te_loss_bytes, unfused_loss_bytes
from planner.specs.job import Job, Precision
from planner.specs.measurement import MeasuredConfiguration

_TORCH_SCORE_BYTES = 10.0
"""Plain attention: bf16 scores, masked scores and weights (2 each), fp32 softmax."""
_MEGATRON_STACKS = ("megatron", "megatron-2021", "megatron-fsdp")


def memory_habits(run: MeasuredConfiguration, stack: Backend, precision: Precision) -> dict[str, Any]:
    """Changes to the stack's habits, of the Megatron family only: others state nothing of the kind."""
    if stack.name == "aleph-alpha":
        return _by_kernel(str(run.extra.get("kernel") or ""))
    if stack.name not in _MEGATRON_STACKS:
        return {}
    changes: dict[str, Any] = {"loss_bytes_per_logit": _loss(run), "state_format": _state_format(run, precision)}
    if "args" in run.extra:
        changes |= megatron_arguments.kernel_habits(settings(run, "args"))
    return changes


def _by_kernel(kernel: str) -> dict[str, Any]:
    """Kernels by the names of Aleph Alpha's sheets: "flash_attention2 + RMS kernel", "fused" softmax, plain
    "torch"."""
    return {
        "eager_norms": bool(kernel) and "RMS" not in kernel,
        "score_bytes": _TORCH_SCORE_BYTES if kernel == "torch" else 2.0,
    }


def optimizer_instances(run: MeasuredConfiguration) -> int:
    """Groups of replicas that each hold the whole optimizer (Megatron's partial distributed optimizer)."""
    return megatron_arguments.optimizer_instances(settings(run, "args"))


def _loss(run: MeasuredConfiguration) -> Callable[[Job], float]:
    """NeMo fuses the loss natively, Megatron-Bridge through Transformer Engine, Megatron-LM only when told to."""
    framework = (run.framework or "").lower()
    stated = megatron_arguments.loss_function(settings(run, "args"))
    if stated is not None:
        return stated
    if framework.startswith("megatron-bridge") or run.extra.get("cross_entropy_fusion"):
        return te_loss_bytes
    return native_loss_bytes if framework.startswith("nemo") else unfused_loss_bytes


def _state_format(run: MeasuredConfiguration, precision: Precision) -> StateFormat | None:
    """Bytes per parameter where gradients, moments or weights have another format than Megatron-LM's default.

    The recipes of NeMo and Megatron-Bridge reduce and keep gradients in bf16 (``grad_reduce_in_fp32`` off), and their
    fp8 configurations keep the weights in 8 bits (``fp8_param_gather`` on: mixed_precision.py of both)."""
    extra, arguments, recipe = run.extra, settings(run, "args"), settings(run, "recipe_settings")
    moments = recipe.get("optimizer.exp_avg_dtype") or arguments.get("exp-avg-dtype") or extra.get("optimizer_moments")
    gather = arguments.get("fp8-param-gather") or extra.get("fp8_param_gather")
    if gather is None and precision == "fp8":
        gather = _recipe_framework(run)
    return megatron_arguments.state_format(
        precision, gradients_in_16_bits=_narrow_gradients(run), moments=moments, gathers_8_bits=gather
    )


def _narrow_gradients(run: MeasuredConfiguration) -> bool:
    """Whether gradients are kept in 16 bits."""
    extra, arguments, recipe = run.extra, settings(run, "args"), settings(run, "recipe_settings")
    stated = recipe.get("ddp.grad_reduce_in_fp32")
    if str(stated) in ("True", "False"):
        return str(stated) == "False"
    main = megatron_arguments.dtype(extra.get("main_grads"))
    if main:
        return main != "fp32"
    return megatron_arguments.narrow_gradients(arguments) or _recipe_framework(run)


def _recipe_framework(run: MeasuredConfiguration) -> bool:
    """Whether the run follows a recipe of NeMo or Megatron-Bridge."""
    return (run.framework or "").lower().startswith(("nemo", "megatron-bridge"))
