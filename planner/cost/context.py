"""The fixed surroundings of a cost question (model, machines, job, framework) and the arrays that every term starts
from.

``CostContext`` holds what is the same for all candidates; ``Work`` adds the per-candidate token counts and degrees.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planner.backends.base import Backend, RecomputeKind
from planner.cost.constants import HOST_TIMES, Constants, ConstantTable, published_constants
from planner.cost.params import LayerKind, distinct_kinds, kind_indices
from planner.cost.uncertainty import Uncertainty, uncertainty_for
from planner.errors import InputError
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec

HOST_MEMORY_SHARE = 0.9
"""Share of a node's memory that training may use; the rest is the operating system, the data loader and page
cache."""


@dataclass(frozen=True)
class CostContext:
    """One model, cluster, job and framework."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    backend: Backend
    table: ConstantTable = field(default_factory=published_constants)

    @cached_property
    def constants(self) -> Constants:
        """Host times and the loopback of ranks that share cores are stretched by the number of ranks on a core."""
        found = self.table.lookup(self.backend.name, self.cluster.accelerator)
        waiting = self.cluster.ranks_per_core
        if waiting == 1.0:
            return found
        stretched = {name: waiting * getattr(found, name) for name in HOST_TIMES}
        return replace(found, fabric_bus_share=found.fabric_bus_share / waiting, **stretched)

    @cached_property
    def uncertainty(self) -> Uncertainty:
        return uncertainty_for(self.backend.family, self.cluster.accelerator.id, self.job, self.model)

    @property
    def overlapped_stages(self) -> tuple[int, ...]:
        """Sharding stages whose gradient and parameter traffic runs beside compute."""
        return () if self.cluster.accelerator.synchronous else self.backend.habits.overlapped_stages

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Distinct layer kinds in order of first appearance; axis K of every coefficient."""
        return distinct_kinds(self.model)

    @cached_property
    def kind_prefix(self) -> IntArray:
        """(L + 1, K) layers of each kind among the first l layers."""
        one_hot = np.eye(len(self.kinds), dtype=np.int64)[list(kind_indices(self.model))]
        return np.concatenate([np.zeros((1, len(self.kinds)), dtype=np.int64), one_hot.cumsum(axis=0)])

    @cached_property
    def recompute_kinds(self) -> tuple[RecomputeKind, ...]:
        return self.backend.recompute_kinds(self.model, self.job)

    @property
    def activation_bytes(self) -> float:
        """Bytes of one activation element."""
        return self.job.compute_bytes

    @cached_property
    def dense_flops_per_s(self) -> float:
        """Dense peak of the format of attention, head and everything that fp8 does not cover."""
        peak = self.cluster.accelerator.peak
        rate = {"fp32": peak.fp32, "fp16": peak.fp16, "bf16": peak.bf16, "fp8": peak.bf16, "nvfp4": peak.bf16}[
            self.job.precision
        ]
        if rate is None:
            raise InputError(
                f"{self.cluster.accelerator.id} has no {self.job.precision} matrix rate",
                where="precision",
                got=self.job.precision,
                allowed=", ".join(n for n in ("bf16", "fp16", "fp8", "fp32") if getattr(peak, n) is not None),
                hint="choose a format that the accelerator computes in",
            )
        return rate * self.cluster.cores_per_rank

    @cached_property
    def layer_flops_per_s(self) -> float:
        """Sustained rate of the layers' matrix multiplications before shape losses."""
        peak = self.cluster.accelerator.peak
        if self.job.precision == "fp8" and peak.fp8 is not None:
            block = self.constants.block_scaled_share if self.backend.scaling_recipe(self.cluster) == "block" else 1.0
            return peak.fp8 * self.constants.gemm_share_fp8 * block
        if self.job.precision == "nvfp4" and peak.fp4 is not None:
            return peak.fp4 * self.constants.gemm_share_fp4
        return self.dense_flops_per_s * self.constants.gemm_share

    @cached_property
    def stream_bytes_per_s(self) -> float:
        """Sustained device-memory bandwidth of elementwise kernels."""
        return self.device_bytes_per_s * self.constants.stream_share

    @property
    def device_bytes_per_s(self) -> float:
        """Peak memory bandwidth of one rank."""
        return self.cluster.accelerator.memory.bytes_per_s * self.cluster.cores_per_rank

    @property
    def memory_factor(self) -> float:
        """What a rank needs over its tensors: memory that a caching allocator cannot use, which a host's has not, and
        what the machine's profile says."""
        habits = self.backend.habits
        return habits.memory_factor * (1.0 if self.cluster.accelerator.synchronous else habits.allocator_factor)

    @property
    def memory_limit_bytes(self) -> float:
        """What a plan may use of one GPU."""
        return self.cluster.memory_bytes_per_gpu * (1.0 - self.job.memory_margin)

    @property
    def host_memory_limit_bytes(self) -> float:
        """What a plan may use of one node's memory."""
        return self.cluster.host_memory_bytes_per_node * HOST_MEMORY_SHARE

    @property
    def memory_upper(self) -> float:
        """Upper end of the memory range over the point estimate."""
        return self.uncertainty.memory_upper


@dataclass(frozen=True)
class Work:
    """Token counts and degrees of N candidates as float arrays."""

    context: CostContext
    batch: StrategyBatch

    @cached_property
    def tp(self) -> FloatArray:
        return self.batch.tp.astype(float)

    @cached_property
    def cp(self) -> FloatArray:
        return self.batch.cp.astype(float)

    @cached_property
    def etp(self) -> FloatArray:
        return self.batch.etp.astype(float)

    @cached_property
    def micro_batches(self) -> FloatArray:
        """Micro-batches of a step; a fraction where the last one is smaller (plans never have that, runs do)."""
        return np.maximum(self.context.job.global_batch / (self.batch.micro_batch * self.batch.dp), 1.0)

    @cached_property
    def tokens(self) -> FloatArray:
        """Tokens of one micro-batch on one rank, before tensor and sequence parallelism: s * b / cp."""
        return self.context.job.seq_len * self.batch.micro_batch / self.cp

    @cached_property
    def traffic_stage(self) -> IntArray:
        """Sharding stage by what travels in every micro-batch: stage 1 where gathered weights are kept for the step."""
        kept = self.context.backend.habits.pipelines_keep_weights & (self.batch.pp > 1) & (self.batch.zero_stage == 3)
        return np.where(kept, 1, self.batch.zero_stage)

    @cached_property
    def sp_tokens(self) -> FloatArray:
        """The same where sequence parallelism splits them over the tp ranks."""
        return np.where(self.batch.sequence_parallel, self.tokens / self.tp, self.tokens)

    @property
    def input_tokens(self) -> FloatArray:
        """Tokens of the inputs that the matrices behind a norm keep for their backward pass."""
        return self.tokens if self.context.backend.habits.gathered_inputs else self.sp_tokens

    @cached_property
    def tensor_overlap(self) -> FloatArray:
        """Share of tensor-parallel traffic hidden behind matrix multiplications."""
        overlaps = self.context.backend.overlaps_tensor_parallel(self.context.cluster, self.batch)
        return np.where(overlaps, self.context.constants.tensor_overlap_share, 0.0)

    @cached_property
    def expert_group(self) -> FloatArray:
        """Replicas of one expert shard: world / (etp * ep * pp)."""
        world = self.batch.tp * self.batch.cp * self.batch.dp
        return np.maximum(world // (self.batch.etp * self.batch.ep), 1).astype(float)

    @cached_property
    def expert_shard_degree(self) -> IntArray:
        """GPUs over which sharded states of expert weights are spread: the share of the replicas that dense weights
        use."""
        dense = np.maximum(self.batch.dp * self.batch.cp, 1)
        shard: IntArray = self.expert_group.astype(np.int64) * self.batch.shard_degree // dense
        return np.where(self.batch.zero_stage > 0, np.maximum(shard, 1), 1)

    @cached_property
    def routed_rows(self) -> FloatArray:
        """Expert inputs of the busiest rank and micro-batch: top_k * tokens (* etp, gathered) where routing is
        balanced."""
        moe = self.context.model.moe
        return (moe.top_k if moe else 0) * self.busiest_share * self.sp_tokens * self.etp

    @cached_property
    def busiest_share(self) -> float:
        """Tokens that the busiest expert rank gets over an even share."""
        balanced = self.context.backend.habits.balanced_routing
        return 1.0 if balanced else self.context.constants.natural_routing_peak

    def zeros(self) -> FloatArray:
        return np.zeros(len(self.batch))
