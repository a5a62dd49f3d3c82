"""torchtitan: FSDP2 and HSDP, tensor, pipeline, context and expert parallelism of its own models.

Plans run version 0.3 with blocks and loss compiled (``--compile.enable``), fp32 parameters with bf16 compute copies,
the cross entropy in chunks of the sequence, FlexAttention and no CUDA graphs, which neither pipelines nor the standard
expert dispatch allow.  Stage 3 is its default reshard policy: gathered weights are freed after the forward pass, but a
pipeline keeps them; stage 2 keeps them everywhere ("never"); stage 0 replicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from planner.backends.base import BufferContext, RecomputeKind, StateBytes
from planner.backends.fsdp import EAGER_LOSS_BYTES, MASTER_BYTES, Fsdp
from planner.backends.torchtitan_rules import LOSS_CHUNKS, RULES
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule

EAGER_HABITS = replace(Fsdp.habits, pipelines_keep_weights=True)
"""Without torch.compile, as versions 0.1 and 0.2 ran by default."""

COMPILED_HABITS = replace(EAGER_HABITS, fused_kernels=True, activation_overhead=1.0, kernels_per_layer=40)
"""With torch.compile: fused elementwise kernels, nothing saved twice."""


def loss_bytes(job: Job) -> float:
    """Bytes per logit: those of the eager loss, of which all but one chunk are gone unless the job wants it whole."""
    return EAGER_LOSS_BYTES if job.loss == "eager" else EAGER_LOSS_BYTES / LOSS_CHUNKS


def dealt_layers(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Even shares of layers, embedding (``first``) and head (``last``), a remainder at the first stages; the two ends
    hold fewer layers (torchtitan 0.3, distributed/pipeline_parallel.py, _generate_llm_fqn_per_model_part)."""
    each, extra = divmod(layers + first + last, stages)
    counts = [each + (stage < extra) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


class Torchtitan(Fsdp):
    """torchtitan 0.3 as plans run it."""

    name = "torchtitan"
    title = "torchtitan"
    versions = "torchtitan >=0.3,<0.4"
    rules = RULES
    expert_degrees = True
    habit_settings: ClassVar[Mapping[str, str]] = {"fused_kernels": "--compile.enable"}
    habits = replace(
        COMPILED_HABITS,
        loss_bytes_per_logit=loss_bytes,
        # torchtitan/distributed/context_parallel/api.py: FlexAttention gathers keys and values before it starts.
        context_parallel_comm="all-gather",
        # torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B: microbatches_per_round.
        equal_rounds=True,
    )

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        """All blocks or none: a policy wraps every block (torchtitan/distributed/activation_checkpoint.py)."""
        return tuple(replace(kind, layer_count=False) for kind in super().recompute_kinds(model, job))

    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        if pp == 1:
            return ("none",) if vpp == 1 else ()
        return ("interleaved",) if vpp > 1 else ("1f1b",)

    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        """parallelism.module_fqns_per_model_part takes any split."""
        return "free" if pp > 1 else "fixed"

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """Embedding and head count as one layer each; None where a stage would hold no layer."""
        if pp * vpp == 1:
            return (model.layers,)
        counts = dealt_layers(model.layers, pp * vpp, 1, 1)
        return counts if min(counts) > 0 else None

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        """Gradients are freed after every step: with one micro-batch those of the layers come to be while activations
        go, so they count in the optimizer step (fused AdamW, no temporaries of its own) and not beside the loss."""
        held = super().state_bytes(job, batch, shard)
        single = job.global_batch <= batch.micro_batch * batch.dp
        kept = (batch.pp > 1) & (batch.zero_stage == 3)
        # An offload moves no gradients that are not beside the weights: freed ones, and whole ones of a stage.
        moved = held.offloadable - np.where(kept | single, held.gradients, 0.0)
        return replace(
            held,
            weights=held.weights + np.where(kept, job.compute_bytes, 0.0),
            gradients=np.where(kept, MASTER_BYTES, np.where(single, 0.0, held.gradients)),
            offloadable=moved,
            step_temporary=np.where(single, held.gradients * (1.0 - batch.offload_optimizer), 0.0),
        )

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """Stages of a pipeline have no gather windows: their weights and gradients are whole all step."""
        windows = np.where(context.batch.pp > 1, 0.0, 1.0)
        buffers = {name: windows * held for name, held in super().buffer_bytes(context).items()}
        if context.model.mtp_layers:
            buffers["logits outside chunks"] = self._whole_logits(context)
        return buffers

    def _whole_logits(self, context: BufferContext) -> FloatArray:
        """Bytes by which the loss of prediction blocks, which takes all logits of all passes at once
        (torchtitan/models/deepseek_v3/mtp.py, MTPLoss), exceeds what the habits count."""
        model, job, batch = context.model, context.job, context.batch
        counted = (1.0 + model.mtp_layers) * self.habits.loss_bytes_per_logit(job)
        passes = (1.0 + model.mtp_layers) * EAGER_LOSS_BYTES
        logits = batch.micro_batch * (job.seq_len / batch.cp) * model.vocab / batch.tp
        return np.asarray((passes - counted) * logits)
