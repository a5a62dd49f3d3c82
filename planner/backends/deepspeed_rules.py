"""What DeepSpeed 0.17 to 0.19 refuses, silently ignores, or runs only with models written for it.

Several of these are not in DeepSpeed's own checks: keys at the wrong ZeRO stage are ignored without a word.
"""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_EXPERT_PARALLEL,
    STAGES_FILLED,
    gpu_vendor,
    schedule_rule,
    zero_stages,
)
from planner.backends.rule_kit import divisible, everywhere, input_rule, predicate, written
from planner.specs.batch import DEVICES, BoolArray

PIPE = "deepspeed/runtime/pipe/engine.py"
ENGINE = "deepspeed/runtime/engine.py"
ULYSSES = "deepspeed/runtime/sequence_parallel/ulysses_sp.py"
AUTOTP = "deepspeed/module_inject/autotp_config.py"
ZERO_CONFIG = "deepspeed/runtime/zero/config.py"
CPU, NVME = DEVICES.index("cpu"), DEVICES.index("nvme")


def balanced(layers: int, stages: int) -> tuple[int, ...]:
    """How partition_method "type:<block>" splits equal blocks: as even as possible, larger stages first."""
    size, larger = divmod(layers, stages)
    return tuple(size + (stage < larger) for stage in range(stages))


def _offloads(context: RuleContext) -> BoolArray:
    return np.asarray((context.batch.offload_optimizer > 0) | (context.batch.offload_parameters > 0), dtype=np.bool_)


# --- Which dimensions go together

NO_FP8 = input_rule(
    "fp8-not-offered",
    lambda c: not c.job.narrow,
    lambda c: f"precision {c.job.precision}",
    reason="DeepSpeed has no fp8 or fp4 training of its own.",
    source="deepspeed/runtime/config.py",
    allowed="precision in bf16, fp16, fp32",
)

LOSS_IMPLEMENTATION = input_rule(
    "loss-implementation",
    lambda c: c.job.loss in ("auto", "eager"),
    lambda c: f"loss {c.job.loss}",
    reason="The model computes its loss itself, eagerly; DeepSpeed does not replace it.",
    source="scope of this backend",
    allowed="loss in auto, eager",
)

NO_SEQUENCE_PARALLEL = predicate(
    "no-sequence-parallel",
    lambda c: ~c.batch.sequence_parallel,
    lambda c, i: f"sequence_parallel(true) with tp({c.batch.tp[i]}), must be false",
    reason="AutoTP keeps whole activations between the split matrices; there is no Megatron sequence parallelism.",
    source=AUTOTP,
)

NO_VIRTUAL_STAGES = predicate(
    "no-virtual-stages",
    lambda c: c.batch.vpp == 1,
    lambda c, i: f"vpp({c.batch.vpp[i]}), must be 1",
    reason="PipelineModule gives each rank one contiguous stage.",
    source="deepspeed/runtime/pipe/module.py",
    vary="vpp",
)

PIPELINE_ZERO_STAGE = predicate(
    "pipeline-zero-stage",
    lambda c: (c.batch.pp == 1) | (c.batch.zero_stage == 1),
    lambda c, i: f"pp({c.batch.pp[i]}) with zero_stage({c.batch.zero_stage[i]}), must be 1",
    reason=(
        "Pipelines refuse ZeRO-2 and 3, and without ZeRO a bf16 pipeline gets the sharded optimizer of stage 1 anyway."
    ),
    source=f"{PIPE}; {ENGINE}",
)

PIPELINE_LAYOUT = predicate(
    "pipeline-layout",
    lambda c: _follows_own_split(c),
    lambda c, i: (
        f"layers_per_stage = {[int(n) for n in c.batch.stage_layers[i] if n]}, "
        f"must be {list(balanced(c.model.layers, int(c.batch.pp[i])))}"
    ),
    reason="PipelineModule splits the blocks itself, as evenly as possible with the larger stages first.",
    source="deepspeed/runtime/pipe/module.py; deepspeed/runtime/utils.py (partition_balanced)",
)


def _follows_own_split(context: RuleContext) -> BoolArray:
    batch = context.batch
    stage = np.arange(batch.stage_layers.shape[1])[None, :]
    pp = np.maximum(batch.pp, 1)[:, None]
    own = np.where(stage < pp, context.model.layers // pp + (stage < context.model.layers % pp), 0)
    return np.asarray((batch.pp == 1) | (batch.stage_layers == own).all(axis=1), dtype=np.bool_)


def _pipeline_fits(context: RuleContext) -> bool:
    model = context.model
    mixers = all(mixer in ("attention", "window", "mla") for mixer, _ in model.layer_kinds())
    return mixers and model.position in ("rope", "learned", "none")


PIPELINE_MODEL = predicate(
    "pipeline-model",
    lambda c: (c.batch.pp == 1) | everywhere(c, _pipeline_fits(c)),
    lambda c, i: (
        f"pp({c.batch.pp[i]}) with mixers {', '.join(sorted({mixer for mixer, _ in c.model.layer_kinds()}))}, "
        f"position {c.model.position}"
    ),
    reason="A pipeline passes one hidden state from block to block, which the plans cover for attention layers only.",
    source="deepspeed/runtime/pipe/module.py",
    vary="pp",
    limit="planner",
)

CONTEXT_NOT_WITH_PIPELINE = predicate(
    "context-not-with-pipeline",
    lambda c: (c.batch.pp == 1) | (c.batch.cp == 1),
    lambda c, i: f"pp({c.batch.pp[i]}) with cp({c.batch.cp[i]}), one must be 1",
    reason="Ulysses brings its own process groups (mpu) and PipelineModule another; an engine takes one of them.",
    source=f"{ULYSSES}; {PIPE}",
    vary="cp",
)

CONTEXT_NOT_WITH_TENSOR = predicate(
    "context-not-with-tensor",
    lambda c: (c.batch.tp == 1) | (c.batch.cp == 1),
    lambda c, i: f"tp({c.batch.tp[i]}) with cp({c.batch.cp[i]}), one must be 1",
    reason="Ulysses and AutoTP both redistribute the attention heads and exclude each other.",
    source="deepspeed/module_inject/auto_ep_folding.py",
    vary="cp",
)

TENSOR_NOT_WITH_PIPELINE = predicate(
    "tensor-not-with-pipeline",
    lambda c: (c.batch.tp == 1) | (c.batch.pp == 1),
    lambda c, i: f"tp({c.batch.tp[i]}) with pp({c.batch.pp[i]}), one must be 1",
    reason="AutoTP rewrites a whole Hugging Face model, and a PipelineModule never builds one.",
    source=f"{ENGINE}; {PIPE}",
    vary="tp",
)

TENSOR_ZERO_STAGE = predicate(
    "tensor-zero-stage",
    lambda c: (c.batch.tp == 1) | (c.batch.zero_stage <= 2),
    lambda c, i: f"tp({c.batch.tp[i]}) with zero_stage({c.batch.zero_stage[i]}), must be at most 2",
    reason="AutoTP trains with ZeRO up to stage 2; stage 3 reads its batch size twice with different replica counts.",
    source="deepspeed/runtime/config.py (train_batch_size)",
    vary="tp",
)

# --- AutoTP and Ulysses

KV_HEADS_OVER_TP = divisible(
    "kv-heads-over-tp",
    ("kv_heads",),
    ("tp",),
    reason="AutoTP gives key/value heads to ranks whole; ranks beyond them would hold no attention at all.",
    source=f"{ENGINE} (a warning only)",
    vary="tp",
)


def _autotp_fits(context: RuleContext) -> bool:
    model = context.model
    plain = all(mixer in ("attention", "window") and mlp == "dense" for mixer, mlp in model.layer_kinds())
    return plain and model.gated_mlp and model.position == "rope" and not model.sinks and model.qk_norm != "full"


TENSOR_PARALLEL_MODEL = predicate(
    "tensor-parallel-model",
    lambda c: (c.batch.tp == 1) | everywhere(c, _autotp_fits(c)),
    lambda c, i: (
        f"tp({c.batch.tp[i]}) with layers {', '.join(sorted({f'{a}/{b}' for a, b in c.model.layer_kinds()}))}, "
        f"gated_mlp({c.model.gated_mlp}), position {c.model.position}"
    ),
    reason=(
        "AutoTP knows how to split the matrices of the families it has presets for; plans use those of dense "
        "Llama-like models."
    ),
    source=AUTOTP,
    vary="tp",
    limit="planner",
)

HEADS_OVER_CP = divisible(
    "heads-over-cp",
    ("heads",),
    ("cp",),
    reason="Ulysses exchanges sequence parts for attention heads, so the heads divide over the ranks.",
    source=ULYSSES,
    vary="cp",
)

KV_HEADS_OVER_CP = predicate(
    "kv-heads-over-cp",
    lambda c: (
        everywhere(c, c.model.mla is not None)
        | (c.model.kv_heads % c.batch.cp == 0)
        | (c.batch.cp % c.model.kv_heads == 0)
    ),
    lambda c, i: (
        f"kv_heads({c.model.kv_heads}) % cp({c.batch.cp[i]}) = {c.model.kv_heads % c.batch.cp[i]} and "
        f"cp({c.batch.cp[i]}) % kv_heads({c.model.kv_heads}) = {c.batch.cp[i] % c.model.kv_heads}, one must be 0"
    ),
    reason="Key/value heads divide over the Ulysses ranks or are repeated evenly on them.",
    source=ULYSSES,
    vary="cp",
)

SEQUENCE_OVER_CP = divisible(
    "sequence-over-cp",
    ("seq_len",),
    ("cp",),
    reason="Each Ulysses rank holds an equal part of the sequence.",
    source=ULYSSES,
    vary="cp",
)


def _ulysses_fits(context: RuleContext) -> bool:
    mixers = all(mixer == "attention" for mixer, _ in context.model.layer_kinds())
    return context.job.flash_attention and mixers and not context.model.sinks and context.model.position != "alibi"


ULYSSES_ATTENTION = predicate(
    "ulysses-attention",
    lambda c: (c.batch.cp == 1) | everywhere(c, _ulysses_fits(c)),
    lambda c, i: (
        f"cp({c.batch.cp[i]}) with mixers {', '.join(sorted({mixer for mixer, _ in c.model.layer_kinds()}))}, "
        f"position {c.model.position}, sinks({c.model.sinks}), flash_attention({c.job.flash_attention})"
    ),
    reason="Ulysses replaces the attention function and knows full causal attention in its fused forms only.",
    source=ULYSSES,
    vary="cp",
)

# --- Sharding and offload

SHARD_WHOLE_GROUP = predicate(
    "shard-whole-group",
    lambda c: (c.batch.zero_stage == 0) | (c.batch.shard_degree == c.batch.dp * c.batch.cp),
    lambda c, i: (
        f"shard_degree({c.batch.shard_degree[i]}), must be {written(c, i, ('dp', 'cp'))} = "
        f"{c.batch.dp[i] * c.batch.cp[i]}"
    ),
    reason="ZeRO spreads states over all data- and sequence-parallel ranks (the MiCS keys for less were removed).",
    source="deepspeed/runtime/config.py",
    vary="shard_degree",
)


def _secondary_fits(context: RuleContext) -> BoolArray:
    batch = context.batch
    size = batch.secondary_shard_degree
    whole = (batch.shard_degree % np.maximum(size, 1) == 0) & (context.cluster.local_gpus % np.maximum(size, 1) == 0)
    legal = (batch.zero_stage == 3) & (size < batch.shard_degree) & whole & (batch.offload_parameters == 0)
    return np.asarray((size == 0) | ((size >= 2) & legal), dtype=np.bool_)


SECONDARY_SHARD = predicate(
    "secondary-shard",
    _secondary_fits,
    lambda c, i: (
        f"secondary_shard_degree({c.batch.secondary_shard_degree[i]}) with zero_stage({c.batch.zero_stage[i]}), "
        f"shard_degree({c.batch.shard_degree[i]}), gpus_per_node({c.cluster.local_gpus}), "
        f"parameters on {DEVICES[c.batch.offload_parameters[i]]}"
    ),
    reason="hpZ is a second copy of ZeRO-3 parameters on the GPUs of a node, smaller than the first and dividing both.",
    source=f"{ZERO_CONFIG} (zero_hpz_partition_size)",
)

OFFLOAD_NEEDS_ZERO = predicate(
    "offload-needs-zero",
    lambda c: ~_offloads(c) | (c.batch.zero_stage >= 1),
    lambda c, i: (
        f"offload share({c.batch.offload_optimizer[i]:g}) with zero_stage({c.batch.zero_stage[i]}), needs 1 to 3"
    ),
    reason="At stage 0 DeepSpeed ignores offload_optimizer without a word.",
    source=ENGINE,
)

OFFLOAD_PARTIAL = predicate(
    "offload-partial",
    lambda c: np.isin(c.batch.offload_optimizer, (0.0, 1.0)) | (c.batch.zero_stage == 3),
    lambda c, i: (
        f"offload share({c.batch.offload_optimizer[i]:g}) with zero_stage({c.batch.zero_stage[i]}), must be 0 or 1"
    ),
    reason="A ratio below 1 leaves some sub-groups on the GPU, and only ZeRO-3 has sub-groups.",
    source=f"{ZERO_CONFIG} (offload_ratio_check)",
)

OFFLOAD_PARAMETERS = predicate(
    "offload-parameters",
    lambda c: (c.batch.offload_parameters == 0) | ((c.batch.zero_stage == 3) & (c.batch.offload_optimizer == 1)),
    lambda c, i: (
        f"parameters on {DEVICES[c.batch.offload_parameters[i]]} with zero_stage({c.batch.zero_stage[i]}) and "
        f"offload share({c.batch.offload_optimizer[i]:g}), needs stage 3 and the whole optimizer offloaded"
    ),
    reason="Below stage 3 DeepSpeed ignores offload_param; weights leave the GPU only after their optimizer states.",
    source=ENGINE,
)


def _nvme_fits(context: RuleContext) -> BoolArray:
    batch = context.batch
    used = (batch.offload_device == NVME) | (batch.offload_parameters == NVME)
    whole = (batch.zero_stage == 3) & (batch.offload_optimizer == 1)
    return np.asarray(~used | (whole & (context.cluster.nvme_bytes_per_s is not None)), dtype=np.bool_)


OFFLOAD_NVME = predicate(
    "offload-nvme",
    _nvme_fits,
    lambda c, i: (
        f"optimizer share({c.batch.offload_optimizer[i]:g}) on {DEVICES[c.batch.offload_device[i]]} with "
        f"zero_stage({c.batch.zero_stage[i]}) and nvme_bytes_per_s({c.cluster.nvme_bytes_per_s}), "
        "needs stage 3, the whole optimizer and a known NVMe rate"
    ),
    reason="States are swapped to NVMe by ZeRO-3 only, and as a whole.",
    source=f"{ENGINE}; deepspeed/runtime/swap_tensor",
)

OFFLOAD_NOT_WITH_PIPELINE = predicate(
    "offload-not-with-pipeline",
    lambda c: ~_offloads(c) | (c.batch.pp == 1),
    lambda c, i: f"pp({c.batch.pp[i]}) with offload share({c.batch.offload_optimizer[i]:g})",
    reason="The optimizer that pipelines run with (BF16_Optimizer) keeps its states on the GPU.",
    source="deepspeed/runtime/bf16_optimizer.py",
    vary="pp",
)

RULES: tuple[Rule, ...] = (
    gpu_vendor("DeepSpeed"),
    NO_FP8,
    LOSS_IMPLEMENTATION,
    *COMMON,
    STAGES_FILLED,
    NO_VIRTUAL_STAGES,
    schedule_rule({"single": ("none",), "plain": ("1f1b",), "virtual": ()}, "deepspeed/runtime/pipe/schedule.py"),
    zero_stages((0, 1, 2, 3), "ZeRO has the stages 0 to 3.", ZERO_CONFIG),
    NO_EXPERT_PARALLEL,
    NO_SEQUENCE_PARALLEL,
    PIPELINE_ZERO_STAGE,
    PIPELINE_LAYOUT,
    PIPELINE_MODEL,
    CONTEXT_NOT_WITH_PIPELINE,
    CONTEXT_NOT_WITH_TENSOR,
    TENSOR_NOT_WITH_PIPELINE,
    TENSOR_ZERO_STAGE,
    HEADS_OVER_TP,
    KV_HEADS_OVER_TP,
    TENSOR_PARALLEL_MODEL,
    HEADS_OVER_CP,
    KV_HEADS_OVER_CP,
    SEQUENCE_OVER_CP,
    ULYSSES_ATTENTION,
    SHARD_WHOLE_GROUP,
    SECONDARY_SHARD,
    OFFLOAD_NEEDS_ZERO,
    OFFLOAD_PARTIAL,
    OFFLOAD_PARAMETERS,
    OFFLOAD_NVME,
    OFFLOAD_NOT_WITH_PIPELINE,
)
