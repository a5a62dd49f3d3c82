"""PyTorch FSDP2 with DTensor tensor parallelism and ring context parallelism, in a training script of the user's own.

Plans run under torchrun with fp32 parameters, bf16 compute copies and fp32 gradient reduction in every micro-batch.
The blocks run eagerly (no torch.compile), the loss is the eager cross entropy, and the optimizer is torch's AdamW in
its default foreach form. Stage 3 frees the gathered weights after the forward pass, stage 2 keeps them, stage 0
replicates them (a shard group of one GPU).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from planner.backends.base import (
    EVERYTHING,
    NONE,
    Backend,
    BufferContext,
    Habits,
    OffloadChoice,
    RecomputeKind,
    StateBytes,
    Tensor,
)
from planner.backends.fsdp_rules import RULES
from planner.backends.rule_kit import divisors
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule

MASTER_BYTES = 4.0
GRADIENT_BYTES = 4.0
MOMENT_BYTES = 8.0
"""fp32 weights, fp32 gradients and two fp32 moments: 16 bytes a parameter, all over the shard group (torch
fully_shard)."""
FOREACH_TEMPORARY_BYTES = 4.0
"""torch.optim.AdamW, foreach form: one more fp32 tensor per parameter while it steps (torch.optim documentation)."""

GATHERED_BLOCKS = 2
"""The block that computes and the one prefetched behind it."""

EAGER_LOSS_BYTES = 12.0
"""bf16 logits, fp32 copy, log-softmax and gradients at their peak; measured on torchtitan's 8B runs."""

LOSS_PARALLEL_BYTES = 6.0
"""More per logit under loss_parallel, whose softmax runs in steps: logits less their maximum 4, the sum's exponentials
4, one bf16 copy less (torch/distributed/tensor/parallel/loss.py)."""

SELECTIVE_DROPS: frozenset[Tensor] = frozenset(
    {
        "norm_input",
        "norm_output",
        "qkv",
        "latent",
        "mlp_up",
        "mlp_act",
        "expert_up",
        "expert_act",
        "shared_experts",
        "router",
    }
)

FULL = RecomputeKind(
    "full",
    "full",
    (),
    EVERYTHING,
    repeats=frozenset({"layer"}),
    layer_count=True,
    regathers=True,
)


def selective_keeps(model: ModelSpec) -> float:
    """Share of the dropped bytes that the per-operator policy keeps: the layer input and every second matrix product.

    Llama-3-8B: 2h + half of 21h of 32h = 0.39; together with the attention output 45 % of a layer stays, as measured.
    """
    hidden, query = model.hidden, model.heads * model.head_dim
    key_value = 2 * model.kv_heads * model.head_dim
    moe = model.moe
    width = model.ffn if moe is None else moe.top_k * moe.expert_ffn + moe.shared_ffn
    inputs = 2 if model.gated_mlp else 1
    products = query + key_value + hidden + inputs * width + hidden
    dropped = 4 * hidden + query + key_value + inputs * width + width
    return (hidden + products / 2) / dropped


class Fsdp(Backend):
    """PyTorch 2.6 or newer: fully_shard, DTensor and context_parallel."""

    name = "fsdp"
    family = "fsdp"
    title = "PyTorch FSDP2"
    versions = "torch >=2.6,<2.14"
    rules = RULES
    expert_degrees = False
    zero_stages: ClassVar[tuple[int, ...]] = (0, 2, 3)
    sequence_parallel_choices = (True,)
    offloads = (OffloadChoice("cpu", "cpu", (2, 3), steps=1),)
    habits = Habits(
        gradient_reduce_bytes=lambda _job: 4.0,
        data_parallel_overlap="every-layer",
        # reshard_after_forward=False keeps the weights until the backward pass, which frees them.
        gathers_every_micro_batch=True,
        # The fp32 shard is copied to the GPU and cast there.
        offloaded_parameter_bytes=MASTER_BYTES,
        tensor_parallel_overlap=False,
        fused_kernels=False,
        loss_bytes_per_logit=lambda _job: EAGER_LOSS_BYTES,
        tensor_parallel_logit_bytes=LOSS_PARALLEL_BYTES,
        # Eager Hugging Face blocks save fp32 norm casts, rotary copies and the unfused product of the gate: 1.3 to 1.5.
        activation_overhead=1.3,
        loss_vocab_parallel=True,
        embedding_vocab_parallel=True,
        context_parallel_comm="ring",
        # About 35 forward in eager mode (norm casts, rotary halves, separate residuals) and twice that backward.
        kernels_per_layer=105,
        vocab_multiple=1,
        # Median of measured runs with expandable segments, which the written environment sets.
        allocator_factor=1.04,
    )

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        if not job.flash_attention or model.mamba is not None or model.gdn is not None:
            # The policy names the fused attention operators; other mixers would be recomputed whole.
            return (NONE, FULL)
        selective = RecomputeKind(
            "selective",
            "selective",
            ("attention", "every-second-matmul"),
            SELECTIVE_DROPS,
            keeps=selective_keeps(model),
            repeats=frozenset({"half_matmuls", "norms", "activation"}),
            regathers=True,
        )
        return (NONE, selective, FULL)

    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        return ("none",)

    def shard_degrees(self, cluster: Cluster, tp: int, cp: int, dp: int, zero_stage: int) -> tuple[int, ...]:
        """The whole group, and the widest part of it on the fast links (hybrid sharding); context ranks are always in
        it."""
        if zero_stage == 0:
            return (1,)
        whole = dp * cp
        inside = [
            d for d in divisors(whole) if d % cp == 0 and 1 < d < whole and cluster.ranks_per_domain % (tp * d) == 0
        ]
        return (whole, *inside[-1:])

    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        return "fixed"

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """Everything on one stage."""
        return (model.layers,) if pp * vpp == 1 else None

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        sharded = batch.zero_stage >= 2
        spread = np.where(sharded, shard, 1).astype(np.float64)
        kept = np.where(batch.zero_stage == 3, 0.0, job.compute_bytes)
        states = (MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES) / spread
        return StateBytes(
            weights=MASTER_BYTES / spread + kept,
            gradients=GRADIENT_BYTES / spread,
            optimizer=MOMENT_BYTES / spread,
            # CPUOffloadPolicy moves weights, gradients and the optimizer together.
            offloadable=states,
            host=states,
            step_temporary=FOREACH_TEMPORARY_BYTES / spread,
        )

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """The root group stays gathered all step; two blocks are gathered, and two wait unsharded for the gradient
        reduction."""
        width = context.job.compute_bytes
        windows = np.where(context.batch.zero_stage == 3, 1.0, 0.0)
        return {
            "gathered embedding and head": windows * width * context.root_params,
            "gathered blocks": windows * width * GATHERED_BLOCKS * context.layer_params,
            "unsharded gradients": GRADIENT_BYTES * GATHERED_BLOCKS * context.layer_params * context.trained_share,
        }
