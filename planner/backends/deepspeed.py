"""DeepSpeed: ZeRO 0 to 3 with offload, AutoTP, Ulysses sequence parallelism, and PipelineModule with ZeRO-1.

Plans run models written for Hugging Face.  Gradients accumulate in fp32 from stage 1 on
(``data_types.grad_accum_dtype``) and in bf16 at stage 0, where DeepSpeed has nothing else.  Experts are plain layers
(ZeRO-3 treats a mixture-of-experts layer as one leaf module); AutoEP is not used.  Bucket and window sizes are
functions of this module, so that the estimate and the written configuration cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
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
)
from planner.backends.deepspeed_rules import CPU, NVME, RULES, balanced
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule

MIN_BUCKET, MAX_BUCKET = 50_000_000, 500_000_000
"""Elements; the default of 5e8 costs 1 to 2 GB, which a small memory cannot spare."""
MAX_LIVE_DEFAULT = 1_000_000_000
"""stage3_max_live_parameters as DeepSpeed sets it: 2 GB of gathered bf16 weights."""
OFFLOAD_SUB_GROUPS = 20
"""An offload ratio counts whole sub-groups, so the rank's parameters are cut into at least this many."""

HOST_FACTOR = 1.5
"""Host memory over the states themselves (deepspeed/runtime/zero/stage3.py, estimators): pinned buffers and staging
copies."""
NVME_HOST_BYTES = 4.0 * HOST_FACTOR + 16.0 / OFFLOAD_SUB_GROUPS
"""fp32 gradients stay in host memory; four swap buffers of one sub-group in fp32 pass through it."""

EAGER_LOSS_BYTES = 14.0
"""Hugging Face loss: bf16 logits, fp32 copy, log-softmax and fp32 gradient (2 + 4 + 4 + 4)."""

FULL = RecomputeKind("full", "full", (), EVERYTHING, repeats=frozenset({"layer"}), regathers=True)


def bucket_elements(hidden: int) -> int:
    """``reduce_bucket_size`` and ``allgather_bucket_size``: one square matrix of the model, within sensible limits."""
    return min(max(hidden * hidden, MIN_BUCKET), MAX_BUCKET)


def prefetch_elements(hidden: int) -> int:
    """``stage3_prefetch_bucket_size``: nine tenths of the reduce bucket, as the integration of transformers has it."""
    return 9 * bucket_elements(hidden) // 10


def persistence_elements(hidden: int) -> int:
    """``stage3_param_persistence_threshold``: keeps norms and biases gathered, nothing larger."""
    return 10 * hidden


def live_elements(layer_params: float) -> int:
    """``stage3_max_live_parameters`` (and the reuse distance): two of the largest layers, at most DeepSpeed's
    default."""
    return int(min(max(2 * layer_params, MIN_BUCKET), MAX_LIVE_DEFAULT))


def sub_group_elements(rank_params: float) -> int:
    """``sub_group_size`` when states are offloaded; ``rank_params`` are those of one rank after all splitting and
    sharding."""
    return max(int(rank_params // OFFLOAD_SUB_GROUPS), 1)


def overlaps_communication(zero_stage: int) -> bool:
    """``overlap_comm``: DeepSpeed's own default."""
    return zero_stage == 3


class DeepSpeed(Backend):
    """DeepSpeed 0.17 to 0.19."""

    name = "deepspeed"
    family = "deepspeed"
    title = "DeepSpeed"
    versions = "deepspeed >=0.18.2,<0.20"
    rules = RULES
    expert_degrees = False
    zero_stages = (0, 1, 2, 3)
    sequence_parallel_choices = (False,)
    offloads = (
        OffloadChoice("cpu", "none", (1, 2), steps=1),
        OffloadChoice("cpu", "none", (3,), steps=OFFLOAD_SUB_GROUPS),
        OffloadChoice("cpu", "cpu", (3,), steps=1),
        OffloadChoice("nvme", "none", (3,), steps=1),
        OffloadChoice("nvme", "cpu", (3,), steps=1),
        OffloadChoice("nvme", "nvme", (3,), steps=1),
    )
    habits = Habits(
        # communication_data_type stays unset: gradients travel in the format of the weights.
        gradient_reduce_bytes=lambda job: job.compute_bytes,
        data_parallel_overlap="every-layer",
        # Without overlap_comm the reduction runs on the compute stream; stage 0 reduces after the backward pass.
        overlapped_stages=tuple(stage for stage in (0, 1, 2, 3) if overlaps_communication(stage)),
        tensor_parallel_overlap=False,
        fused_kernels=False,
        loss_bytes_per_logit=lambda _job: EAGER_LOSS_BYTES,
        # Eager Hugging Face blocks save fp32 norm casts, rotary copies and the unfused product of the gate: 1.3 to 1.5.
        activation_overhead=1.3,
        loss_vocab_parallel=False,
        embedding_vocab_parallel=False,
        context_parallel_comm="all-to-all",
        # About 35 forward in eager mode (norm casts, rotary halves, separate residuals) and twice that backward.
        kernels_per_layer=105,
        vocab_multiple=1,
        # With expandable segments, which the written environment sets; buckets of changing size fragment a little more.
        allocator_factor=1.06,
    )

    habit_settings: ClassVar[Mapping[str, str]] = {
        "reduce_bucket": "reduce_bucket_size to the square of the hidden size",
        "gathered_parameters": "stage3_max_live_parameters to two layers' parameters",
        "optimizer_temporary": 'an "optimizer" section of type AdamW, which runs fused',
    }

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        return (NONE, FULL)

    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        return ("1f1b",) if pp > 1 else ("none",)

    def shard_degrees(self, cluster: Cluster, tp: int, cp: int, dp: int, zero_stage: int) -> tuple[int, ...]:
        return (1,) if zero_stage == 0 else (dp * cp,)

    def secondary_shard_degrees(self, cluster: Cluster, shard_degree: int, zero_stage: int) -> tuple[int, ...]:
        """hpZ over the GPUs of a node, where that is less than the whole group."""
        node = cluster.local_gpus
        near = zero_stage == 3 and 1 < node < shard_degree and shard_degree % node == 0
        return (0, node) if near else (0,)

    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        return "fixed"

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        if vpp > 1 or pp > model.layers:
            return None
        return balanced(model.layers, pp)

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        stage = batch.zero_stage
        degree = np.where(stage >= 1, shard, 1).astype(np.float64)
        weight = job.compute_bytes
        optimizer = self._optimizer_bytes(job, batch) / degree
        gradients = self._gradient_bytes(job, batch, degree)
        second = np.where(batch.secondary_shard_degree > 0, weight / np.maximum(batch.secondary_shard_degree, 1), 0.0)
        weights = np.where(stage == 3, weight / degree, weight)
        parameters_leave = batch.offload_parameters > 0
        # Stage 1 keeps its accumulated gradients; stages 2 and 3 move the fp32 gradients with the states.
        leaves = optimizer + np.where(stage >= 2, 4.0 / degree, 0.0) + np.where(parameters_leave, weights, 0.0)
        return StateBytes(
            weights=weights + second,
            gradients=gradients,
            optimizer=optimizer,
            offloadable=np.where(stage == 0, 0.0, leaves),
            host=self._host_bytes(batch, weight) / degree,
            # The wrapper of stage 0 builds flat fp32 gradients for the step; later stages hold theirs all along.
            step_temporary=np.where((stage == 0) & (job.precision != "fp32"), 4.0, 0.0)
            + self._unfused_bytes(stage) / degree,
        )

    def _unfused_bytes(self, stage: IntArray) -> FloatArray:
        """What an unfused step adds: stages 1 and 2 update their whole partition at once, stage 3 a sub-group of 1e9
        parameters at a time, which is small beside the activations that are gone by then."""
        return np.where(stage < 3, self.habits.optimizer_temporary, 0.0)

    @staticmethod
    def _optimizer_bytes(job: Job, batch: StrategyBatch) -> FloatArray:
        """fp32 master weights (none for fp32 weights that are not flattened apart) and two moments."""
        if job.precision == "fp32":
            return np.where(np.isin(batch.zero_stage, (1, 2)), 12.0, 8.0)
        return np.full(len(batch), 12.0)

    def _gradient_bytes(self, job: Job, batch: StrategyBatch, degree: FloatArray) -> FloatArray:
        """Stage 1: .grad plus fp32 accumulation, both whole (bf16_optimizer.py); where they accumulate in the format of
        the weights, an fp32 partition for the step instead (zero/stage_1_and_2.py, step)."""
        stage, weight = batch.zero_stage, job.compute_bytes
        fp32 = self.habits.accumulates_in_fp32
        apart = job.precision != "fp32" and (job.precision == "bf16" if fp32 is None else fp32)
        accumulated = weight + 4.0 if apart else weight + 4.0 / degree
        later = np.where(stage == 2, (weight + 4.0) / degree, 4.0 / degree)
        return np.asarray(np.where(stage == 0, weight, np.where(stage == 1, accumulated, later)), dtype=np.float64)

    @staticmethod
    def _host_bytes(batch: StrategyBatch, weight: float) -> FloatArray:
        """16 bytes of states a parameter (18 with ZeRO-3's 16-bit copy), with buffers; NVMe keeps gradients and swap
        buffers."""
        states = np.where(batch.zero_stage == 3, 16.0 + weight, 16.0) * HOST_FACTOR
        on_nvme = NVME_HOST_BYTES + np.where(batch.offload_parameters == CPU, weight * HOST_FACTOR, 0.0)
        return np.asarray(np.where(batch.offload_device == NVME, on_nvme, states), dtype=np.float64)

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """Buckets of the gradient reduction and parameter gathering, and what ZeRO-3 holds gathered."""
        stage = context.batch.zero_stage
        width = context.job.compute_bytes
        bucket = float(bucket_elements(context.model.hidden))
        # The pipeline's optimizer reduces its fp32 gradients in place.
        plain = (stage >= 1) & (context.batch.pp == 1)
        habits = self.habits
        reduced = bucket if habits.reduce_bucket is None else habits.reduce_bucket
        live = np.clip(2 * context.layer_params, MIN_BUCKET, MAX_LIVE_DEFAULT)
        if habits.gathered_parameters is not None:
            live = np.asarray(habits.gathered_parameters)
        live = np.minimum(live, context.rank_params)
        largest = np.maximum(context.layer_params, context.root_params / 2)
        third = np.where(stage == 3, 1.0, 0.0)
        return {
            "reduce bucket": np.where(plain, width * reduced * habits.reduce_buckets, 0.0),
            "all-gather bucket": np.where(np.isin(stage, (1, 2)), width * bucket, 0.0),
            "gathered parameters": third * width * np.maximum(live, largest),
            "unsharded gradients": np.where(stage >= 2, width * context.layer_params * context.trained_share, 0.0),
        }
