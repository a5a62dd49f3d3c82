"""PyTorch without a framework around it: FSDP2, DTensor tensor parallelism, torch.distributed.pipelining and experts by
all-to-all, as ``planner validate`` trains a plan.

Sharding: stage 0 keeps whole weights and all-reduces gradients once a step; stages 2 and 3 are fully_shard with and
without gathered weights kept.  Under a pipeline fully_shard keeps the weights of a stage gathered and its gradients
unsharded until the last micro-batch (torch/distributed/pipelining/stage.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from planner.backends.base import BufferContext, RecomputeKind, StateBytes, Tensor
from planner.backends.fsdp import GATHERED_BLOCKS, GRADIENT_BYTES, MASTER_BYTES, Fsdp
from planner.backends.pytorch_rules import RULES
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule


def kept_products(model: ModelSpec) -> tuple[tuple[Tensor, float], ...]:
    """Shares of the saved tensors that stay under selective recomputation: the layer's input, query and value (of
    latent attention the query and the joint keys and values), and the first matrix of the MLP
    (planner_validate/trainer/model.py)."""
    if model.mla is not None:
        mla, heads = model.mla, model.heads
        query, value = heads * (mla.qk_nope + mla.qk_rope), heads * mla.v_head
        attention = (query + heads * (mla.qk_nope + mla.v_head)) / (2 * query + value)
    else:
        query, value = model.heads * model.head_dim, model.kv_heads * model.head_dim
        before_norm = query + value if model.qk_norm != "none" else 0
        attention = (query + value) / (query + 2 * value + before_norm)
    matrices = 2 if model.gated_mlp else 1
    return (
        ("norm_input", 1.0 / model.norms_per_layer),
        ("qkv", attention),
        ("mlp_up", 1.0 / matrices),
        ("expert_up", 1.0 / matrices),
        ("shared_experts", 1.0 / (matrices + 1)),
    )


class PyTorch(Fsdp):
    """torch 2.8 or newer, as the package planner_validate runs it."""

    name = "pytorch"
    family = "pytorch"
    title = "PyTorch alone"
    versions = "torch >=2.8,<2.14"
    rules = RULES
    expert_degrees = True
    habits = replace(
        Fsdp.habits,
        pipelines_keep_weights=True,
        # Norms, rotary positions and gated products save what a fused kernel would
        # (planner_validate/trainer/layers.py).
        activation_overhead=1.0,
        gathered_inputs=True,
        # Planning estimates (FSDP2's eager count and half as many each): calibration fits what they stand for.
        kernels_per_layer=120,
        tensor_parallel_kernels=60,
        sharding_kernels=60,
        padded_experts=True,
        # planner_validate/trainer/context.py gathers keys and values in front of the attention.
        context_parallel_comm="all-gather",
        # Outputs of a stage wait for their backward pass; weight gradients wait for a rank's number of micro-batches
        # (torch/distributed/pipelining: stage.py; schedules.py, ScheduleInterleavedZeroBubble).
        keeps_logits=True,
        even_in_flight=True,
        weight_gradients_wait=True,
        # ScheduleInterleaved1F1B there: microbatches_per_round.
        equal_rounds=True,
    )
    layer_buffers = frozenset({"gathered blocks", "unsharded gradients"})

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        """FSDP2's choices, where the matrix products that selective recomputation keeps are known by name."""
        return tuple(
            replace(kind, keeps=0.0, kept=kept_products(model), whole_layer=True) if kind.mode == "selective" else kind
            for kind in super().recompute_kinds(model, job)
        )

    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        if pp == 1:
            return ("none",) if vpp == 1 else ()
        return ("interleaved",) if vpp > 1 else ("1f1b", "gpipe", "zb-h1")

    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        return "free" if pp > 1 else "fixed"

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """Even shares, a remainder at the first stages."""
        stages = pp * vpp
        each, extra = divmod(model.layers, stages)
        return tuple(each + (stage < extra) for stage in range(stages)) if each else None

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        """Gradients are freed after every step: with one micro-batch those of the layers come to be while activations
        go, so they count in the optimizer step and not beside the loss."""
        held = super().state_bytes(job, batch, shard)
        single = job.global_batch <= batch.micro_batch * batch.dp
        kept = (batch.pp > 1) & (batch.zero_stage >= 2)
        # In 16 bits plain data parallelism is fully_shard over one rank, whose 16-bit copies stay.
        copies = (batch.zero_stage == 0) & (job.precision != "fp32")
        whole = np.where((batch.zero_stage == 0) & ~copies, MASTER_BYTES, held.weights)
        staying = copies | (batch.zero_stage == 2) | ((batch.pp > 1) & (batch.zero_stage == 3))
        # An offload moves no gradients that are not beside the weights: freed ones, and whole ones of a stage.
        moved = held.offloadable - np.where(kept | single, held.gradients, 0.0)
        return replace(
            held,
            weights=whole + np.where((batch.pp > 1) & (batch.zero_stage == 3), job.compute_bytes, 0.0),
            gathered=np.where(staying, job.compute_bytes, 0.0),
            gradients=np.where(kept, MASTER_BYTES, np.where(single, 0.0, held.gradients)),
            offloadable=moved,
            step_temporary=np.where(single, held.gradients * (1.0 - batch.offload_optimizer), 0.0),
        )

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """Gather windows of sharded weights; stages of a pipeline hold theirs whole all step."""
        batch = context.batch
        # Experts that lie on ranks of their own are gathered and reduced apart from the rest of their block, so that
        # only one layer's are there at a time.
        apart = (batch.ep * batch.tp > 1) & (context.model.moe is not None)
        blocks = np.where(apart, 1, GATHERED_BLOCKS)
        windows = np.where((batch.pp > 1) | (batch.zero_stage == 0), 0.0, 1.0)
        width = context.job.compute_bytes
        gathered = np.where(batch.zero_stage == 3, windows, 0.0)
        return {
            "gathered embedding and head": gathered * width * context.root_params,
            "gathered blocks": gathered * width * blocks * context.layer_params,
            "unsharded gradients": windows * GRADIENT_BYTES * blocks * context.layer_params,
        }
