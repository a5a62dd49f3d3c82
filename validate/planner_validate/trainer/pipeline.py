"""The pipeline schedule of a plan, by ``torch.distributed.pipelining``.

Virtual stage k lies on pipeline rank k modulo the number of ranks.  Shapes between stages are given in advance, so no
extra pass finds them out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from planner.errors import InputError
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner_validate.trainer.layout import Layout
from planner_validate.trainer.model import Stage

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    # The same order of work as ZB-H1 where a rank has one stage: input gradients first, weight gradients in the gaps.
    "zb-h1": ScheduleInterleavedZeroBubble,
}


def stage_layers(strategy: Strategy, model: ModelSpec) -> list[range]:
    """Layers of every virtual stage in model order."""
    counts = strategy.layers_per_stage or (model.layers,)
    if len(counts) != strategy.pp * strategy.vpp or sum(counts) != model.layers:
        raise InputError(
            "layers_per_stage does not describe the model",
            where="strategy.layers_per_stage",
            got=f"{list(counts)} for {model.layers} layers on pp({strategy.pp}) * vpp({strategy.vpp}) stages",
            allowed="one number for each virtual stage, together all layers",
        )
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def own_stages(strategy: Strategy, rank: int) -> list[int]:
    """Virtual stages of one pipeline rank."""
    return [rank + chunk * strategy.pp for chunk in range(strategy.vpp)]


def make_schedule(
    stages: dict[int, Stage],
    layout: Layout,
    *,
    device: torch.device,
    compute: torch.dtype,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """The schedule object over this rank's ``stages`` (by virtual index); the loss is already scaled."""
    strategy = layout.strategy
    kind = SCHEDULES[strategy.pipeline_schedule]
    number = strategy.pp * strategy.vpp
    group = layout.group("pp")
    wrapped = []
    for index, stage in stages.items():
        inputs, outputs = _shapes(stage, strategy, compute)
        wrapped.append(PipelineStage(stage, index, number, device, input_args=inputs, output_args=outputs, group=group))
    options = {"n_microbatches": strategy.grad_accum, "loss_fn": loss, "scale_grads": False}
    many = issubclass(kind, PipelineScheduleMulti)
    return kind(wrapped if many else wrapped[0], **options)


def _shapes(stage: Stage, strategy: Strategy, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """Shapes of one micro-batch at both ends of a stage, as tensors without memory."""
    rows, tokens, spec = strategy.micro_batch, strategy.seq_len // strategy.cp, stage.spec
    held = tokens // strategy.tp if strategy.sequence_parallel else tokens
    stream = torch.empty((rows, held, spec.hidden), dtype=compute, device="meta", requires_grad=True)
    inputs = torch.empty((rows, tokens), dtype=torch.int64, device="meta") if stage.first else stream
    logits = torch.empty((rows, tokens, spec.vocab // strategy.tp), dtype=compute, device="meta", requires_grad=True)
    return inputs, logits if stage.last else stream


def run_schedule(schedule: Any, stages: dict[int, Stage], tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """All micro-batches of one step; returns their scaled losses on the rank of the last stage, else nothing."""
    losses: list[Tensor] = []
    arguments = (tokens,) if any(stage.first for stage in stages.values()) else ()
    last = any(stage.last for stage in stages.values())
    options: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        options["return_outputs"] = False
    schedule.step(*arguments, **options)
    return losses
