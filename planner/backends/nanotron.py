"""nanotron: tensor parallelism with reduce-scatter, 1F1B, ZeRO-0 or 1, fp32 gradient accumulation.

Plans run with its run_train.py on the dense Llama and Qwen2 models; the same class prices measured runs.  It is no
release on PyPI: rules and files are those of the repository at 2411b022 (2026-04).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from planner.backends.base import EVERYTHING, NONE, BufferContext, OffloadChoice, RecomputeKind, StateBytes, StateFormat
from planner.backends.deepspeed import EAGER_LOSS_BYTES
from planner.backends.megatron import Megatron
from planner.backends.nanotron_rules import RULES, layers_by_cost
from planner.specs.batch import BoolArray, FloatArray, IntArray, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule

FUSED_NORM_BYTES = 4.0
"""Memory traffic of a norm in one kernel per hidden element, forward: read 2, write 2."""

WEIGHT_BYTES = 2.0
GRADIENT_BYTES = 2.0 + 4.0
OPTIMIZER_BYTES = 12.0
"""bf16 weights; the bf16 gradient of every parameter stays beside its fp32 accumulator; fp32 weights and two moments
(nanotron/optim/gradient_accumulator.py)."""

FULL = RecomputeKind("full", "full", (), EVERYTHING, repeats=frozenset({"layer"}), regathers=True)
"""recompute_layer: every layer or none."""


class Nanotron(Megatron):
    """nanotron as its repository holds it; it runs a step like Megatron-LM, with kernels of its own."""

    name = "nanotron"
    family = "nanotron"
    title = "nanotron"
    versions = "git 2411b022 (2026-04)"
    rules = RULES
    expert_degrees = False
    zero_stages = (0, 1)
    sequence_parallel_choices = (True, False)
    offloads: ClassVar[tuple[OffloadChoice, ...]] = ()  # type: ignore[assignment]  # Megatron's is a tuple of one
    habits = replace(
        Megatron.habits,
        fused_kernels=False,
        attention_kernel="flash2",
        vocab_multiple=1,
        # Triton RMSNorm.
        norm_bytes=FUSED_NORM_BYTES,
        # fp32 logits: cast (6), maximum (4), shift (8), exponential (8), sum (4), division (8), copy (8), times the
        # incoming gradient (8), cast back (6); nanotron/parallel/tensor_parallel/functional.py.  Kernels this long
        # stream at 0.92 of peak where others reach 0.75.
        loss_traffic_bytes=48.0,
        # A 16-bit gradient is written (2), read (2) and added to the fp32 one (8).
        gradient_add_bytes=12.0,
        # Gathers of the backward pass run beside the input gradients, scatters beside the weight gradients.
        tensor_parallel_overlap=True,
        overlap_buffers=1.0,
        kernels_per_layer=200,
        # bf16 logits, fp32 copy, log-softmax and fp32 gradient.
        loss_bytes_per_logit=lambda _job: EAGER_LOSS_BYTES,
        eager_copies=True,
        transformer_engine=False,
        fused_gradient_accumulation=False,
        # Keys and values are gathered some heads at a time (nanotron/nn/llama3_ring_attention.py).
        context_parallel_comm="all-gather",
        context_parallel_balanced=False,
    )

    def __init__(self, *, published: bool = False) -> None:
        """``published``: split as its published runs ask for, whose costs tie exactly: a stage ends with a tie, and the
        last one may hold the head alone."""
        self._published = published

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        return (NONE, FULL)

    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        if vpp > 1:
            return ()
        return ("1f1b", "gpipe") if pp > 1 else ("none",)

    def shard_degrees(self, cluster: Cluster, tp: int, cp: int, dp: int, zero_stage: int) -> tuple[int, ...]:
        """All replicas; context-parallel ranks hold the same states."""
        return (dp if zero_stage else 1,)

    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        return "fixed"

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """The split by cost (``layers_by_cost``); None for virtual stages, and where a stage would have no layer."""
        counts = layers_by_cost(model, pp, tie_closes=self._published)
        return counts if vpp == 1 and (self._published or min(counts) > 0) else None

    def overlaps_tensor_parallel(self, cluster: Cluster, batch: StrategyBatch) -> BoolArray:
        """Asynchronous collectives of NCCL, which run over any links."""
        return np.asarray((batch.tp > 1) & batch.sequence_parallel & self.habits.tensor_parallel_overlap)

    def state_format(self, job: Job) -> StateFormat:
        """Bytes per parameter, as the run states them or as plans are written."""
        return self.habits.state_format or StateFormat(WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES)

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        """Whole weights and gradients, optimizer states spread over the shard at stage 1."""
        ones, stored = np.ones(len(batch)), self.state_format(job)
        states = stored.optimizer / np.where(batch.zero_stage >= 1, shard, 1).astype(np.float64)
        return StateBytes(stored.weights * ones, stored.gradients * ones, states, states, states, 0.0 * ones)

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """DistributedDataParallel's buckets are views of the gradients."""
        return {}
