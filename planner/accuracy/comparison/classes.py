"""Which class of runs a record belongs to, and whether its time is a steady training step that can be compared.

A class is a kind of software and number format whose error is published as one figure; it is decided by what the record
says of the run, never by what was measured."""

from __future__ import annotations

from planner.specs.measurement import MeasuredRun

_MEGATRON = ("megatron", "nemo")
_FSDP = ("fsdp", "torchtitan", "llm-foundry", "fms")
_USUAL_TP = 8
_ONE_NODE = 8
GRID_SOURCES = ("nanotron", "aleph")
"""Sources that ran a grid of layouts with one software on one cluster: rows of a sweep differ in layout only."""
MAX_GRID_GPUS = 128
"""Beyond it nanotron's grid has stalls of about a second a micro-batch on all layouts with pipelines."""


def class_of_run(run: MeasuredRun) -> str:
    """The class under which the errors of the record are reported."""
    framework, precision = (run.run.framework or "").lower(), (run.run.precision or "").lower()
    narrow = "fp8" in precision or "fp4" in precision
    if _adapters(run):
        return "lora"
    if framework.startswith(_MEGATRON):
        return _megatron(run, narrow)
    if framework.startswith(_FSDP):
        return "fsdp 8/4-bit" if narrow else "fsdp 16-bit"
    if framework.startswith("nanotron"):
        return "nanotron usual layouts" if _usual_layout(run) else "nanotron odd layouts"
    return "aleph alpha" if framework.startswith("aleph") else "other"


def _adapters(run: MeasuredRun) -> bool:
    return "lora" in run.task or "peft" in run.task


def _megatron(run: MeasuredRun, narrow: bool) -> str:
    if run.model.moe is not None:
        return "megatron moe 8/4-bit" if narrow else "megatron moe 16-bit"
    if narrow:
        return "megatron dense 8/4-bit"
    return "megatron dense 16-bit" if run.run.recompute else "megatron dense 16-bit, recompute unknown"


def _usual_layout(run: MeasuredRun) -> bool:
    """No tensor parallelism, or tensor parallelism inside a node without a pipeline, or a single node."""
    tp, gpus = run.run.tp, run.hardware.gpus
    inside_node = run.run.pp == 1 and tp is not None and tp <= _USUAL_TP
    return tp == 1 or inside_node or (gpus is not None and gpus <= _ONE_NODE)


def not_a_step(run: MeasuredRun) -> str | None:
    """Why the run is no training step of a job; None if it is."""
    if run.task.startswith(("ci-test", "single")):
        return "test of the framework or a single layer, not a training step"
    return None


def excluded_from_time(run: MeasuredRun) -> str | None:
    """Why the step time is not compared; None if it is."""
    framework = (run.run.framework or "").lower()
    if (reason := not_a_step(run)) is not None:
        return reason
    if "nanotron" in framework and not run.run.global_batch:
        return "nanotron row without a global batch"
    if "nanotron" in framework and (run.hardware.gpus or 0) > MAX_GRID_GPUS:
        return f"nanotron on more than {MAX_GRID_GPUS} GPUs: stalls of software or fabric on most layouts"
    if "old" in run.source_name and "nanotron" in run.source_name:
        return "nanotron's older benchmark, before its pipeline was rewritten"
    if _adapters(run) and run.run.recompute is None:
        return "LoRA with recomputation not stated"
    return None
