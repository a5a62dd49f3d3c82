"""Hugging Face accelerate with the Trainer: the FSDP2 and the DeepSpeed step in accelerate's spelling.

The written files ask for the parent's step (gradients reduced in every micro-batch, DeepSpeed's own configuration
file); what still differs is stated here, with the place in accelerate 1.15 or transformers 5.23 that makes it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from planner.backends.accelerate_rules import DEEPSPEED_RULES, FSDP_RULES
from planner.backends.base import NONE, BufferContext, RecomputeKind, StateBytes
from planner.backends.deepspeed import EAGER_LOSS_BYTES, DeepSpeed
from planner.backends.fsdp import FULL, GATHERED_BLOCKS, Fsdp
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.job import Job
from planner.specs.model import ModelSpec

VERSIONS = "accelerate >=1.15,<1.16; transformers >=5.23,<6"

EVERY_LAYER = replace(FULL, layer_count=False)
"""fsdp_activation_checkpointing wraps every block (accelerate/utils/fsdp_utils.py, fsdp2_apply_ac)."""


class AccelerateFsdp(Fsdp):
    """FSDP2 set up by accelerate from its YAML file, driven by the Trainer."""

    name = "accelerate-fsdp"
    title = "accelerate FSDP2"
    versions = f"{VERSIONS}; torch >=2.6,<2.14"
    rules = Fsdp.rules + FSDP_RULES
    zero_stages = (2, 3)
    sequence_parallel_choices = (False,)
    habits = replace(
        Fsdp.habits,
        # FullyShardedDataParallelPlugin.set_mixed_precision: reduce_dtype is the compute format, not fp32.
        gradient_reduce_bytes=lambda job: job.compute_bytes,
        # transformers/loss/loss_utils.py, ForCausalLMLoss: logits are copied to fp32 before the eager cross entropy.
        loss_bytes_per_logit=lambda _job: EAGER_LOSS_BYTES,
    )

    habit_settings: ClassVar[Mapping[str, str]] = {
        "accumulates_unsharded": '"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
    }

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        """Nothing or every block: neither file names operators or a number of layers of a stage."""
        return (NONE, EVERY_LAYER)

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        """The parent's sixteen bytes, upcast to fp32 by accelerate (fsdp_utils.py, fsdp2_prepare_model); the fused
        AdamW that the written arguments choose needs no temporary copy."""
        states = super().state_bytes(job, batch, shard)
        return replace(states, step_temporary=np.zeros_like(states.step_temporary))

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """The head stays gathered from the forward to the backward pass, an untied embedding is a shard unit of its own
        that is freed (fsdp_utils.py, fsdp2_prepare_model); gradients wait in the format they are reduced in: of two
        blocks, or of everything while no_sync accumulates them (torch _fsdp_param_group.py, post_backward)."""
        buffers = super().buffer_bytes(context)
        batch = context.batch
        whole = self.habits.accumulates_unsharded & (batch.zero_stage >= 2)
        whole = whole & (batch.grad_accum(context.job.global_batch) > 1)
        waiting = np.where(whole, context.rank_params, GATHERED_BLOCKS * context.layer_params)
        kept = 1.0 if context.model.tied else 0.5
        gathered = buffers.pop("gathered embedding and head")
        return {
            "gathered head": kept * gathered,
            **buffers,
            "unsharded gradients": context.job.compute_bytes * waiting * context.trained_share,
        }


class AccelerateDeepSpeed(DeepSpeed):
    """DeepSpeed set up by accelerate from its YAML file and ds_config.json, driven by the Trainer."""

    name = "accelerate-deepspeed"
    title = "accelerate DeepSpeed"
    # Ulysses through accelerate needs 0.18.2 (accelerator.py, _prepare_deepspeed).
    versions = f"{VERSIONS}; deepspeed >=0.18.2,<0.20"
    rules = DeepSpeed.rules + DEEPSPEED_RULES
