"""Megatron-LM: tensor, sequence, context, pipeline and expert parallelism with the distributed optimizer.

Plans run with pretrain_gpt.py and Transformer Engine.  Choices that the written arguments fix, and that memory and
time depend on: gradients accumulate in fp32, the loss uses the native fused cross entropy
(--cross-entropy-loss-fusion; core 0.19 refuses Transformer Engine's) unless the job asks for the eager one, ring
context parallelism (p2p), grouped GEMM with the all-to-all dispatcher, and fp8 with current scaling on Hopper and
mxfp8 on Blackwell: delayed scaling would forbid recomputing norms and expert activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from planner.backends.base import (
    EVERYTHING,
    NONE,
    Backend,
    BufferContext,
    Habits,
    NarrowRecipe,
    OffloadChoice,
    RecomputeKind,
    StateBytes,
    StateFormat,
)
from planner.backends.megatron_rules import FROM_BLACKWELL, RULES
from planner.backends.rule_kit import divisors
from planner.specs.batch import BoolArray, FloatArray, IntArray, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Schedule

# Bytes per parameter, docs/user-guide/features/dist_optimizer.md and megatron/training/theoretical_memory_usage.py.
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 4.0, "nvfp4": 3.125}
"""fp8 on Hopper: the bf16 weight plus cached row-wise and transposed fp8 copies (mxfp8 on Blackwell holds two copies
as well); nvfp4 holds two copies of half a byte with a scale every 16 elements."""
GRADIENT_BYTES = {"bf16": 4.0, "fp16": 2.0, "fp32": 4.0, "fp8": 4.0, "nvfp4": 4.0}
OPTIMIZER_BYTES = {"bf16": 12.0, "fp16": 12.0, "fp32": 8.0, "fp8": 12.0, "nvfp4": 12.0}
"""fp32 master weights and two moments; fp32 weights need no master."""
FP32_GRADIENT_COPY_BYTES = 4.0
"""The optimizer copies gradients that are not fp32 into that format, and frees the copy before the next forward
pass."""
MASTER_BYTES = 4.0
"""Of these, the fp32 master weights."""
OFFLOAD_HOST_BYTES = 20.0
"""HybridDeviceOptimizer: pinned bf16 weight and gradient (4), their fp32 copies (8), two fp32 moments (8)."""

UNFUSED_LOSS_BYTES = 6.0
"""Per logit: bf16 logits and the fp32 copy that becomes softmax and gradient in place (2 + 4).  Measured by
Megatron-LM's functional tests, as is the next."""
NATIVE_LOSS_BYTES = 10.0
"""--cross-entropy-fusion-impl native: the compiled functions cannot work in place and hold a second fp32 copy."""
TE_LOSS_BYTES = 4.0
"""--cross-entropy-fusion-impl te: bf16 logits overwritten by their gradient, and one bf16 copy (19 measured runs of
SimuMax)."""


def loss_bytes(job: Job) -> float:
    """Bytes per logit as plans run it."""
    return UNFUSED_LOSS_BYTES if job.loss == "eager" else NATIVE_LOSS_BYTES


def te_loss_bytes(_job: Job) -> float:
    """Bytes per logit with --cross-entropy-fusion-impl te."""
    return TE_LOSS_BYTES


def unfused_loss_bytes(_job: Job) -> float:
    """Bytes per logit without --cross-entropy-loss-fusion."""
    return UNFUSED_LOSS_BYTES


def native_loss_bytes(_job: Job) -> float:
    """Bytes per logit with --cross-entropy-fusion-impl native."""
    return NATIVE_LOSS_BYTES


CORE_ATTENTION = RecomputeKind(
    "core_attn", "selective", ("core_attn",), frozenset({"attention_scores"}), repeats=frozenset({"attention_core"})
)
# The input of the MLP checkpoint stays: only what the MLP itself saves goes.
MLP = RecomputeKind("mlp", "selective", ("mlp",), frozenset({"mlp_up", "mlp_act"}), repeats=frozenset({"mlp"}))
MOE_ACTIVATION = RecomputeKind(
    "moe_act", "selective", ("moe_act",), frozenset({"expert_act"}), repeats=frozenset({"expert_activation"})
)
SHARED_EXPERTS = RecomputeKind(
    "shared_experts",
    "selective",
    ("shared_experts",),
    frozenset({"shared_experts"}),
    repeats=frozenset({"shared_experts"}),
)
MLA_UP = RecomputeKind("mla_up_proj", "selective", ("mla_up_proj",), frozenset({"qkv"}), repeats=frozenset({"qkv_up"}))
MOE = RecomputeKind(
    "moe",
    "selective",
    ("moe",),
    frozenset({"expert_up", "expert_act", "shared_experts", "router"}),
    repeats=frozenset({"moe"}),
    regathers=True,
)
GATED_DELTA_NET = RecomputeKind(
    "gdn", "selective", ("gdn",), frozenset({"mixer_state"}), repeats=frozenset({"attention_core"})
)
FULL = RecomputeKind("full", "full", (), EVERYTHING, repeats=frozenset({"layer"}), layer_count=True, regathers=True)


def _norm_kind(keeps: float) -> RecomputeKind:
    return RecomputeKind(
        "layernorm",
        "selective",
        ("layernorm",),
        frozenset({"norm_output"}),
        keeps=keeps,
        repeats=frozenset({"norms"}),
    )


def _joined(*kinds: RecomputeKind) -> RecomputeKind:
    """Several selective modules at once."""
    return RecomputeKind(
        "+".join(kind.id for kind in kinds),
        "selective",
        tuple(module for kind in kinds for module in kind.modules),
        frozenset().union(*(kind.drops for kind in kinds)),
        repeats=frozenset().union(*(kind.repeats for kind in kinds)),
        regathers=any(kind.regathers for kind in kinds),
    )


def _mixture_kinds(latent_attention: bool) -> list[RecomputeKind]:
    """Selective choices of a mixture of experts.

    Transformer Engine fuses a norm into the matrix that follows, and a fused norm cannot be recomputed: with plain
    attention only the norm before the router stands alone (half of the norm outputs), with latent attention both do
    (megatron/core/models/gpt/gpt_layer_specs.py).
    """
    norms = _norm_kind(0.0 if latent_attention else 0.5)
    if not latent_attention:
        return [norms, MOE_ACTIVATION, MOE]
    return [norms, MOE_ACTIVATION, MLA_UP, _joined(norms, MOE_ACTIVATION, MLA_UP), MOE]


def overlaps_tensor_parallel(cluster: Cluster, tp: IntArray, sequence_parallel: BoolArray) -> BoolArray:
    """Where --tp-comm-overlap is written: its user buffers need sequence parallelism and a tp group on NVLink."""
    nvlink = cluster.accelerator.fabric.kind.startswith("nvlink")
    return np.asarray((tp > 1) & sequence_parallel & (cluster.ranks_per_domain % tp == 0) & nvlink)


def runs_flex_dispatcher(cluster: Cluster) -> bool:
    """DeepEP passes tokens on over NVLink and runs on NVIDIA GPUs only."""
    accelerator = cluster.accelerator
    return accelerator.vendor == "nvidia" and accelerator.fabric.kind.startswith("nvlink")


def dispatches_once_per_domain(cluster: Cluster, ep: int, etp: int) -> bool:
    """Whether the flex dispatcher (DeepEP) is written: where it runs and expert groups leave the fast links."""
    return runs_flex_dispatcher(cluster) and ep > 1 and cluster.ranks_per_domain % (ep * etp) != 0


def joined_kind(modules: list[str], model: ModelSpec) -> RecomputeKind:
    """The kind that recomputes any combination of Megatron's selective modules, by their configuration names.

    ``moe`` covers everything inside the block; ``mlp`` means dense blocks only; names without a counterpart in the cost
    model save and repeat nothing.
    """
    norms = _norm_kind(0.0 if model.mla is not None else 0.5)
    modular = (CORE_ATTENTION, MLP, MOE_ACTIVATION, SHARED_EXPERTS, MLA_UP, MOE, GATED_DELTA_NET, norms)
    known = {kind.id: kind for kind in modular}
    inside = {"moe_act", "shared_experts"} if "moe" in modules else set()
    chosen = [known[name] for name in modules if name in known and name not in inside]
    return _joined(*chosen) if chosen else NONE


def stated_kind(modules: Sequence[str], model: ModelSpec) -> RecomputeKind:
    """The kind of any --recompute-modules list, under exactly the names that a configuration gives: with it among the
    kinds, ``from_strategy`` finds the strategy that was read."""
    kind = joined_kind(list(modules), model)
    return replace(kind, id="+".join(modules), mode="selective", modules=tuple(modules))


def _beside_prediction_blocks(model: ModelSpec, stages: int, chunked: bool) -> tuple[int, ...]:
    """Layers of each stage where the last one also holds prediction blocks and their passes through the head."""
    h, moe = model.hidden, model.moe
    width = moe.top_k * moe.expert_ffn + moe.shared_ffn if moe is not None else model.ffn
    layer = (4 * h + 3 * width) * h
    weight = model.mtp_layers + round((1 + model.mtp_layers) * model.vocab * h / layer)
    last = max(-(-(model.layers + weight) // stages) - weight, 1)
    if chunked:
        # Chunks of an interleaved schedule stay as even as the layer count allows.
        last = max(last, model.layers - (stages - 1) * -(-model.layers // stages))
    layers, extra = divmod(model.layers - last, stages - 1)
    return (*(layers + (stages - 1 - stage <= extra) for stage in range(stages - 1)), last)


class Megatron(Backend):
    """Megatron-LM as released with megatron-core 0.16 to 0.19."""

    name = "megatron"
    family = "megatron"
    title = "Megatron-LM"
    versions = "megatron-core >=0.16,<0.20"
    rules = RULES
    expert_degrees = True
    zero_stages = (0, 1)
    sequence_parallel_choices = (True, False)
    offloads = (OffloadChoice("cpu", "none", (1,), steps=20),)
    bare_last_stage = True
    habit_settings: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_overlap": "--tp-comm-overlap",
        "dropout": "--attention-dropout 0 --hidden-dropout 0",
        "fused_gradient_accumulation": "no --no-gradient-accumulation-fusion",
        "deterministic": "no --deterministic-mode",
        "transformer_engine": "--transformer-impl transformer_engine",
        "fused_activation": "no --no-bias-gelu-fusion",
        "overlapped_stages": "--overlap-grad-reduce --overlap-param-gather",
        "expert_dispatch": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        "blocking_launches": "no CUDA_LAUNCH_BLOCKING",
    }
    habits = Habits(
        gradient_reduce_bytes=lambda job: GRADIENT_BYTES[job.precision],
        data_parallel_overlap="last-micro-batch",
        # --tp-comm-overlap: user buffers hide the gathers and most of the scatters.
        tensor_parallel_overlap=True,
        fused_kernels=True,
        loss_bytes_per_logit=loss_bytes,
        activation_overhead=1.0,
        loss_vocab_parallel=True,
        embedding_vocab_parallel=True,
        context_parallel_comm="ring",
        # 12 forward (norms, two matrices of each half, rotary, attention, activation, residuals) and twice that
        # backward.
        kernels_per_layer=36,
        vocab_multiple=128,
        # Median of 43 measured runs with expandable segments, which the written environment sets.
        allocator_factor=1.04,
        attention_kernel="vendor",
        transformer_engine=True,
        expert_dispatch="flex-between-domains",
    )

    def scaling_recipe(self, cluster: Cluster) -> NarrowRecipe:
        """mxfp8 where the hardware scales blocks, else current scaling."""
        block = cluster.accelerator.architecture in FROM_BLACKWELL
        return self.habits.narrow_recipe or ("block" if block else "tensor")

    def flexible_dispatch(self, cluster: Cluster) -> bool:
        return runs_flex_dispatcher(cluster)

    def overlaps_tensor_parallel(self, cluster: Cluster, batch: StrategyBatch) -> BoolArray:
        usable = overlaps_tensor_parallel(cluster, batch.tp, batch.sequence_parallel)
        return np.asarray(usable & self.habits.tensor_parallel_overlap)

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        kinds = [NONE]
        if not job.flash_attention:
            kinds.append(CORE_ATTENTION)
        if model.moe is not None:
            kinds += _mixture_kinds(model.mla is not None)
        elif model.mla is not None:
            # Dense MLPs keep their norm fused, so half of the norm outputs stay.
            kinds += [_norm_kind(0.5), MLA_UP, MLP, _joined(MLA_UP, MLP)]
        else:
            kinds.append(MLP)
        return (*kinds, FULL)

    def named_recompute(self, modules: tuple[str, ...], model: ModelSpec) -> RecomputeKind | None:
        """Any list of --recompute-modules; the default is core_attn."""
        return stated_kind(modules or ("core_attn",), model)

    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        if vpp > 1:
            return ("interleaved",)
        return ("1f1b",) if pp > 1 else ("none",)

    def shard_degrees(self, cluster: Cluster, tp: int, cp: int, dp: int, zero_stage: int) -> tuple[int, ...]:
        """The whole group, and the widest part of it that stays on the fast links (optimizer instances)."""
        if zero_stage == 0:
            return (1,)
        whole = dp * cp
        near = max(degree for degree in divisors(whole) if degree == 1 or cluster.ranks_per_domain % (tp * degree) == 0)
        return (whole, near) if 1 < near < whole else (whole,)

    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        """--pipeline-model-parallel-layout takes any split."""
        return "free" if pp > 1 else "fixed"

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """Even; a remainder goes to the middle stages, because the ends also hold embedding and head.

        A last stage with prediction blocks gives up as many layers as blocks and head passes weigh (DeepSeek-V3 over
        16 stages: four layers each, one beside the block and the loss), as NVIDIA's recipes lay it out."""
        stages = pp * vpp
        if stages > model.layers:
            return None
        if model.mtp_layers and stages > 1:
            return _beside_prediction_blocks(model, stages, chunked=vpp > 1)
        layers, extra = divmod(model.layers, stages)
        middle_first = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
        larger = set(middle_first[:extra])
        return tuple(layers + (stage in larger) for stage in range(stages))

    def state_format(self, job: Job) -> StateFormat:
        """Bytes per parameter of weights, gradients and optimizer, as the run states them or for its precision."""
        return self.habits.state_format or StateFormat(
            WEIGHT_BYTES[job.precision], GRADIENT_BYTES[job.precision], OPTIMIZER_BYTES[job.precision]
        )

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        ones = np.ones(len(batch))
        spread = np.where(batch.zero_stage >= 1, shard, 1).astype(np.float64)
        stored = self.state_format(job)
        optimizer = stored.optimizer / spread
        return StateBytes(
            weights=stored.weights * ones,
            gradients=stored.gradients * ones,
            optimizer=optimizer,
            offloadable=optimizer,
            host=OFFLOAD_HOST_BYTES / spread,
            step_temporary=(FP32_GRADIENT_COPY_BYTES if stored.gradients < 4.0 else 0.0) / spread,
            narrow_copies=max(stored.weights - WEIGHT_BYTES["bf16"], 0.0) if job.narrow else 0.0,
        )

    def frozen_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> FloatArray:
        """Frozen weights are cached in the narrow format like trained ones."""
        spread = np.where(batch.zero_stage == 3, np.maximum(shard, 1), 1)
        return np.asarray(self.state_format(job).weights / spread)

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """Fused gradient accumulation leaves one dummy gradient of each distinct weight shape alive."""
        if not self.habits.fused_gradient_accumulation:
            return {}
        return {"dummy weight gradients": context.job.compute_bytes * context.distinct_weight_params}
