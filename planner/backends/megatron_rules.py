"""What Megatron-LM's pretrain_gpt.py (megatron-core 0.16 to 0.19) refuses, silently changes, or cannot express.

Files named as sources are those of that repository; several limits are raised only at group creation, model build or
the first step.
"""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_SECONDARY_SHARD,
    SEQUENCE_PARALLEL_NEEDS_TP,
    fp8_alignment,
    gpu_vendor,
    schedule_rule,
    stages_filled,
    zero_stages,
)
from planner.backends.megatron_model_rules import ARGUMENTS, CONFIG, MODEL_RULES
from planner.backends.rule_kit import divisible, everywhere, input_rule, predicate, written
from planner.specs.batch import DEVICES, BoolArray, IntArray

STATE = "megatron/core/parallel_state.py"
SCHEDULES_FILE = "megatron/core/pipeline_parallel/schedules.py"
LAYOUT_FILE = "megatron/core/transformer/pipeline_parallel_layer_layout.py"
LAYERS_FILE = "megatron/core/tensor_parallel/layers.py"

BEFORE_AMPERE = ("pascal", "volta", "turing")


def _is_moe(context: RuleContext) -> BoolArray:
    return everywhere(context, context.model.moe is not None)


def _has_mlp(context: RuleContext, kind: str) -> BoolArray:
    return everywhere(context, any(mlp == kind for _, mlp in context.model.layer_kinds()))


# --- How the GPUs divide

EXPERT_WORLD_SIZE = divisible(
    "expert-world-size",
    ("gpus",),
    ("etp", "ep", "pp"),
    reason="Expert ranks form their own grid: etp * ep * pp must divide the GPUs, the rest is expert data parallelism.",
    source=f"{STATE}, at group creation only; etp is always written out because it defaults to tp",
    when=_is_moe,
    vary="ep",
)

EXPERT_PARALLEL_NEEDS_EXPERTS = predicate(
    "expert-parallel-needs-experts",
    lambda c: _is_moe(c) | ((c.batch.ep == 1) & (c.batch.etp == 1)),
    lambda c, i: (
        f"{written(c, i, ('ep', 'etp'))} = {c.batch.ep[i] * c.batch.etp[i]}, must be 1: the model has no experts"
    ),
    reason="Expert parallelism splits the experts of a mixture-of-experts model, and this model has none.",
    source=ARGUMENTS,
    vary="ep",
)

EXPERTS_OVER_EP = divisible(
    "experts-over-ep",
    ("experts",),
    ("ep",),
    reason="Every expert-parallel rank holds the same number of experts.",
    source=f"{ARGUMENTS}; {CONFIG}",
    when=_is_moe,
    vary="ep",
)


def _expert_shards(context: RuleContext) -> BoolArray:
    batch = context.batch
    edp = context.cluster.gpus // np.maximum(batch.etp * batch.ep * batch.pp, 1)
    instances = np.maximum(batch.dp * batch.cp // np.maximum(batch.shard_degree, 1), 1)
    return np.asarray(~_is_moe(context) | (batch.zero_stage == 0) | (edp % instances == 0), dtype=np.bool_)


def _expert_shards_equation(context: RuleContext, index: int) -> str:
    batch = context.batch
    edp = context.cluster.gpus // int(batch.etp[index] * batch.ep[index] * batch.pp[index])
    instances = int(batch.dp[index] * batch.cp[index] // batch.shard_degree[index])
    return f"expert data parallel({edp}) % optimizer instances({instances}) = {edp % instances}, must be 0"


EXPERT_OPTIMIZER_INSTANCES = predicate(
    "expert-optimizer-instances",
    _expert_shards,
    _expert_shards_equation,
    reason="The number of distributed-optimizer instances divides the expert data-parallel group too.",
    source=f"{STATE} (num_distributed_optimizer_instances)",
    vary="shard_degree",
)

# --- Tensor, sequence and context parallelism

KV_HEADS_OVER_TP = predicate(
    "kv-heads-over-tp",
    lambda c: (
        everywhere(c, c.model.mla is not None)
        | (c.model.kv_heads % c.batch.tp == 0)
        | (c.batch.tp % c.model.kv_heads == 0)
    ),
    lambda c, i: (
        f"kv_heads({c.model.kv_heads}) % tp({c.batch.tp[i]}) = {c.model.kv_heads % c.batch.tp[i]} and "
        f"tp({c.batch.tp[i]}) % kv_heads({c.model.kv_heads}) = {c.batch.tp[i] % c.model.kv_heads}, one must be 0"
    ),
    reason="Key/value heads are split evenly over tp, or evenly shared by several tp ranks.",
    source=f"{CONFIG}; megatron/core/transformer/attention.py",
    vary="tp",
)

HIDDEN_OVER_TP = divisible(
    "hidden-over-tp",
    ("hidden",),
    ("tp",),
    reason="Row- and column-parallel matrices split the hidden width evenly.",
    source=LAYERS_FILE,
    vary="tp",
)

FFN_OVER_TP = divisible(
    "ffn-over-tp",
    ("ffn",),
    ("tp",),
    reason="The dense MLP width is split evenly over tp.",
    source=LAYERS_FILE,
    when=lambda c: _has_mlp(c, "dense"),
    vary="tp",
)

EXPERT_FFN_OVER_ETP = divisible(
    "expert-ffn-over-etp",
    ("expert_ffn",),
    ("etp",),
    reason="The width of an expert is split evenly over its tensor-parallel ranks.",
    source=LAYERS_FILE,
    when=_is_moe,
    vary="etp",
)

SHARED_FFN_OVER_TP = divisible(
    "shared-ffn-over-tp",
    ("shared_ffn",),
    ("tp",),
    reason="Shared experts are split over tp like a dense MLP.",
    source=LAYERS_FILE,
    when=lambda c: _is_moe(c),
    vary="tp",
)

SEQUENCE_OVER_CP_TP = divisible(
    "sequence-parallel-sequence",
    ("seq_len",),
    ("cp", "tp"),
    reason="With sequence parallelism each tp rank holds the same number of the tokens of a context-parallel rank.",
    source="megatron/core/tensor_parallel/mappings.py, in the forward pass",
    when=lambda c: c.batch.sequence_parallel,
    vary="tp",
)

MOE_NEEDS_SEQUENCE_PARALLEL = predicate(
    "moe-needs-sequence-parallel",
    lambda c: ~_is_moe(c) | (c.batch.tp == 1) | c.batch.sequence_parallel,
    lambda c, i: (
        f"experts({c.model.moe.experts if c.model.moe else 0}) with tp({c.batch.tp[i]}) and sequence_parallel(false)"
    ),
    reason=(
        "A mixture-of-experts layer under tensor parallelism routes each token once, which needs sequence parallelism."
    ),
    source="megatron/core/transformer/moe/moe_layer.py, in the training forward pass",
    vary="tp",
)

CONTEXT_PARALLEL_SEQUENCE = divisible(
    "context-parallel-sequence",
    ("seq_len",),
    (2, "cp"),
    reason="Ring attention balances causal work by giving each rank two chunks of the sequence.",
    source=ARGUMENTS,
    when=lambda c: c.batch.cp > 1,
    vary="cp",
)

CONTEXT_PARALLEL_FLASH = predicate(
    "context-parallel-flash",
    lambda c: everywhere(c, c.job.flash_attention) | (c.batch.cp == 1),
    lambda c, i: f"cp({c.batch.cp[i]}) with flash_attention(false)",
    reason="Context parallelism exists only in Transformer Engine's fused attention.",
    source="megatron/core/transformer/dot_product_attention.py",
    vary="cp",
)

CONTEXT_PARALLEL_MASKS = predicate(
    "context-parallel-masks",
    lambda c: everywhere(c, c.model.window is None and not c.model.sinks) | (c.batch.cp == 1),
    lambda c, i: f"cp({c.batch.cp[i]}) with sliding-window attention or attention sinks",
    reason="The ring exchange of Transformer Engine knows neither sliding windows nor learned sinks.",
    source="transformer_engine/pytorch/attention (context parallelism: windows need all-gather or all-to-all)",
    vary="cp",
)

# --- Pipeline

VIRTUAL_STAGES_NEED_PIPELINE = predicate(
    "virtual-stages-need-pipeline",
    lambda c: (c.batch.vpp == 1) | (c.batch.pp > 1),
    lambda c, i: f"vpp({c.batch.vpp[i]}) with pp({c.batch.pp[i]}), needs pp > 1",
    reason="Interleaving spreads several model chunks over the stages of a pipeline.",
    source=ARGUMENTS,
    vary="vpp",
)

OUTER_SLOTS = 3
"""Layer-sized places that embedding, head and a prediction block may take in an interleaved layout."""


def _chunk_slots(context: RuleContext) -> tuple[IntArray, IntArray]:
    """(most layers of a chunk in an even split, places that even chunks would leave empty)."""
    stages = context.batch.pp * context.batch.vpp
    most = -(-context.model.layers // stages)
    return most, most * stages - context.model.layers


def _even_chunks(context: RuleContext) -> BoolArray:
    most, empty = _chunk_slots(context)
    fits = (context.batch.stage_layers.max(axis=1) <= most) & (empty <= OUTER_SLOTS)
    return np.asarray((context.batch.vpp == 1) | fits, dtype=np.bool_)


def _even_chunks_equation(context: RuleContext, index: int) -> str:
    most, empty = _chunk_slots(context)
    pp, vpp = context.batch.pp[index], context.batch.vpp[index]
    return (
        f"pp({pp}) * vpp({vpp}) chunks of {most[index]} layers leave {empty[index]} places empty for "
        f"layers({context.model.layers}), at most {OUTER_SLOTS}; the fullest chunk has "
        f"{context.batch.stage_layers[index].max()} layers, at most {most[index]}"
    )


def chunk_counts(layers: int, pp: int) -> list[int]:
    """Chunks of a rank into which ``layers`` go evenly enough for the interleaved schedule; 1 always."""
    counts = range(2, layers // pp + 1) if pp > 1 else ()
    return [1, *(v for v in counts if -layers % (pp * v) <= OUTER_SLOTS)]


def _chunk_counts_listed(context: RuleContext, index: int) -> str:
    counts = chunk_counts(context.model.layers, int(context.batch.pp[index]))
    return f"vpp in {', '.join(map(str, counts))}, layers spread evenly"


INTERLEAVED_CHUNKS = Rule(
    "interleaved-chunks",
    "The interleaved schedule runs all chunks in lockstep: they hold equally many layers, less at most one each for "
    "embedding, head and prediction block; anything else stalls it and is not planned.",
    "planner's own limit; megatron/core/pipeline_parallel/schedules.py (interleaved schedule)",
    _even_chunks,
    _even_chunks_equation,
    _chunk_counts_listed,
    limit="planner",
)

INTERLEAVED_MICRO_BATCHES = divisible(
    "interleaved-micro-batches",
    ("micro_batches",),
    ("pp",),
    reason=(
        "The interleaved schedule moves micro-batches in groups of pp; a smaller last group is refused in the "
        "first step."
    ),
    source=SCHEDULES_FILE,
    when=lambda c: c.batch.vpp > 1,
    vary="micro_batch",
)

# --- Optimizer


def _offloads(context: RuleContext) -> BoolArray:
    return np.asarray(context.batch.offload_optimizer > 0, dtype=np.bool_)


OFFLOAD_NEEDS_DISTRIBUTED_OPTIMIZER = predicate(
    "offload-needs-distributed-optimizer",
    lambda c: ~_offloads(c) | (c.batch.zero_stage >= 1),
    lambda c, i: (
        f"offload share({c.batch.offload_optimizer[i]:g}) with zero_stage({c.batch.zero_stage[i]}), needs stage 1"
    ),
    reason="Optimizer offload rides on the precision-aware optimizer, which needs the distributed optimizer.",
    source=f"{ARGUMENTS}; megatron/core/optimizer/optimizer_config.py",
)

OFFLOAD_PRECISION = predicate(
    "offload-precision",
    lambda c: ~_offloads(c) | everywhere(c, c.job.precision == "bf16" or c.job.narrow),
    lambda c, i: (
        f"offload share({c.batch.offload_optimizer[i]:g}) with precision {c.job.precision}, needs bf16 weights"
    ),
    reason=(
        "The precision-aware optimizer that carries the offload is used with bf16 weights (fp8 and nvfp4 jobs keep "
        "bf16 weights)."
    ),
    source="megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py",
)

OFFLOAD_DEVICE = predicate(
    "offload-device",
    lambda c: (c.batch.offload_device <= DEVICES.index("cpu")) & (c.batch.offload_parameters == 0),
    lambda c, i: (
        f"optimizer on {DEVICES[c.batch.offload_device[i]]} and parameters on "
        f"{DEVICES[c.batch.offload_parameters[i]]}, only the optimizer can leave, and only to cpu"
    ),
    reason="Megatron offloads optimizer states to host memory; it has no NVMe tier and keeps the weights on the GPU.",
    source=f"{ARGUMENTS} (optimizer_cpu_offload)",
)

# --- Mixture of experts

MOE_BIAS = predicate(
    "moe-bias-needs-etp-1",
    lambda c: ~_is_moe(c) | everywhere(c, not c.model.bias.mlp) | (c.batch.etp == 1),
    lambda c, i: f"expert biases with etp({c.batch.etp[i]}), must be etp = 1",
    reason="Experts with biases cannot be split over tensor-parallel ranks.",
    source=CONFIG,
    vary="etp",
)

GROUPED_GEMM = input_rule(
    "grouped-gemm",
    lambda c: c.model.moe is None or c.cluster.accelerator.architecture.lower() not in BEFORE_AMPERE,
    lambda c: f"mixture of experts on {c.cluster.accelerator.architecture}, needs compute capability 8.0",
    reason="Experts are multiplied by a grouped GEMM, which exists from Ampere on.",
    source=ARGUMENTS,
)

FROM_BLACKWELL = frozenset({"blackwell", "blackwell-ultra"})
"""Architectures with block-scaled fp8 in hardware; Megatron counts all others, AMD's among them, as older."""

RULES: tuple[Rule, ...] = (
    gpu_vendor("Megatron-LM"),
    *MODEL_RULES,
    GROUPED_GEMM,
    *COMMON,
    stages_filled(but_for_the_ends=True, source=LAYOUT_FILE),
    schedule_rule({"single": ("none",), "plain": ("1f1b",), "virtual": ("interleaved",)}, SCHEDULES_FILE),
    zero_stages(
        (0, 1),
        "Plain data parallelism or the distributed optimizer; Megatron-FSDP is not among the plans written here.",
        ARGUMENTS,
        limit="planner",
    ),
    HEADS_OVER_TP,
    KV_HEADS_OVER_TP,
    HIDDEN_OVER_TP,
    FFN_OVER_TP,
    EXPERT_PARALLEL_NEEDS_EXPERTS,
    EXPERTS_OVER_EP,
    EXPERT_WORLD_SIZE,
    EXPERT_OPTIMIZER_INSTANCES,
    EXPERT_FFN_OVER_ETP,
    SHARED_FFN_OVER_TP,
    MOE_BIAS,
    MOE_NEEDS_SEQUENCE_PARALLEL,
    SEQUENCE_PARALLEL_NEEDS_TP,
    SEQUENCE_OVER_CP_TP,
    CONTEXT_PARALLEL_SEQUENCE,
    CONTEXT_PARALLEL_FLASH,
    CONTEXT_PARALLEL_MASKS,
    VIRTUAL_STAGES_NEED_PIPELINE,
    INTERLEAVED_CHUNKS,
    INTERLEAVED_MICRO_BATCHES,
    OFFLOAD_NEEDS_DISTRIBUTED_OPTIMIZER,
    OFFLOAD_PRECISION,
    OFFLOAD_DEVICE,
    fp8_alignment("transformer_engine/pytorch/utils.py (fp8 shape check)"),
    NO_SECONDARY_SHARD,
)
