"""What a torchtitan plan can hold: limits of its trainer, meshes, pipeline, experts and models.

Sources name files of torchtitan 0.3.0 unless they say torch (2.13). ``model_module`` names the model package that can
build a model; rules, renderer and reader share it."""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_SECONDARY_SHARD,
    SEQUENCE_PARALLEL_NEEDS_TP,
    STAGES_FILLED,
    fp8_alignment,
    gpu_vendor,
    schedule_rule,
    zero_stages,
)
from planner.backends.fsdp_rules import (
    FP8_DENSE,
    KEPT_WEIGHTS_NEED_SHARDS,
    OFFLOAD_NEEDS_SHARDING,
    OFFLOAD_WHOLE,
    SHARD_COVERS_CONTEXT,
)
from planner.backends.rule_kit import divisible, everywhere, input_rule, predicate
from planner.specs.batch import BoolArray, IntArray
from planner.specs.model import BiasSpec, ModelSpec

TRAINER = "torchtitan/trainer.py"
FULLY_SHARD = "torchtitan/distributed/fsdp.py (apply_fsdp_to_decoder)"
MESHES = "torchtitan/distributed/parallel_dims.py"
SCHEDULES_SOURCE = "torch/distributed/pipelining/schedules.py"

LOSS_CHUNKS = 8
"""Parts of the sequence whose logits exist at a time (torchtitan/components/loss.py, ChunkedLossWrapper)."""

SCHEDULE_NAMES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""Ours and torch's. Its zero-bubble schedules place two chunks on every rank (InterleavedZeroBubble, ZBVZeroBubble),
which the one-chunk schedules of the cost model are not."""


def _plain_decoder(model: ModelSpec) -> bool:
    """Pre-norm blocks of rotary attention and SwiGLU without biases, which all of torchtitan's text models share."""
    block = model.norm == "rmsnorm" and model.norms_per_layer == 2 and not model.parallel_block and model.final_norm
    mlp = model.gated_mlp and model.activation == "silu" and model.bias == BiasSpec() and not model.head_bias
    attention = model.position == "rope" and model.window is None and not (model.sinks or model.attention_gate)
    table = model.embedding_width in (0, model.hidden) and not (model.embedding_projections or model.embedding_norm)
    return block and mlp and attention and table and model.pattern is None


def _plain_experts(model: ModelSpec) -> bool:
    moe = model.moe
    return moe is None or not (moe.latent or moe.router_bias or moe.shared_gate)


def model_module(model: ModelSpec) -> str | None:
    """The package below torchtitan/models whose classes build the model; None where there is none.

    qwen3 also builds mixtures without its norms on queries and keys: the norm is optional there.
    """
    if not _plain_decoder(model) or not _plain_experts(model):
        return None
    if model.mla is not None:
        latent = model.qk_norm == "none" and not model.tied and model.moe is not None and model.moe.every == 1
        # Its builder counts shared experts, each as wide as a routed one.
        whole = model.moe is not None and model.moe.shared_ffn > 0 and model.moe.shared_ffn % model.moe.expert_ffn == 0
        return "deepseek_v3" if latent and whole else None
    if model.mtp_layers or model.qk_norm == "full":
        return None
    return "qwen3" if model.moe is not None or model.qk_norm == "per_head" else "llama3"


MODEL_FAMILY = input_rule(
    "model-family",
    lambda c: model_module(c.model) is not None,
    lambda c: (
        f"model {c.model.name}: position {c.model.position}, norm {c.model.norm}, activation {c.model.activation}, "
        f"qk_norm {c.model.qk_norm}, biases({c.model.bias != BiasSpec()}), window({c.model.window is not None}), "
        f"mixers {', '.join(sorted({mixer for mixer, _ in c.model.layer_kinds()}))}, mtp_layers({c.model.mtp_layers})"
    ),
    reason=(
        "The written registry builds models from torchtitan's llama3, qwen3 and deepseek_v3 classes: rotary attention "
        "or latent attention, RMSNorm, SwiGLU and experts without biases."
    ),
    source="torchtitan/models",
    allowed="models like Llama 2 and 3, Mistral, Qwen3, Mixtral, DeepSeek-V2 and V3",
    limit="files",
)

FLEX_ATTENTION = input_rule(
    "flex-attention",
    lambda c: c.job.flash_attention,
    lambda c: f"flash_attention({c.job.flash_attention})",
    reason="Language models run FlexAttention or variable-length attention, which never store their scores.",
    source="torchtitan/models/common/config_utils.py (get_attention_config)",
    allowed="flash_attention true",
)

NUMBER_FORMATS = input_rule(
    "precision-offered",
    lambda c: c.job.precision in ("bf16", "fp32", "fp8"),
    lambda c: f"precision {c.job.precision}",
    reason="Mixed precision takes bfloat16 or float32, and the written registry converts linear layers to float8 only.",
    source="torchtitan/config/configs.py (TrainingConfig.mixed_precision_param), components/quantization",
    allowed="precision in bf16, fp8, fp32",
)

EXPERTS_IN_16_BITS = input_rule(
    "experts-in-bf16",
    lambda c: c.job.precision != "fp32" or c.model.moe is None,
    lambda c: f"precision {c.job.precision} with experts({c.model.moe.experts if c.model.moe else 0})",
    reason="Grouped expert multiplications cast to bfloat16 whatever the precision of the rest.",
    source="torchtitan/models/common/moe.py (GroupedExperts.forward)",
    allowed="precision bf16",
)

WHOLE_WEIGHTS = input_rule(
    "no-adapters",
    lambda c: c.job.task != "lora",
    lambda c: f"task {c.job.task}",
    reason="The written registry trains all weights and adds no adapters.",
    source="scope of this backend",
    allowed="task in pretrain, sft",
    limit="planner",
)

LOSS_IMPLEMENTATION = input_rule(
    "loss-implementation",
    lambda c: c.job.loss in ("auto", "chunked", "eager"),
    lambda c: f"loss {c.job.loss}",
    reason="The loss is the compiled cross entropy, in chunks of the sequence or of all logits at once.",
    source="torchtitan/components/loss.py",
    allowed="loss in auto, chunked, eager",
)

PREDICTION_LOSS = input_rule(
    "prediction-loss",
    lambda c: not c.model.mtp_layers or c.job.loss in ("auto", "eager"),
    lambda c: f"loss {c.job.loss} with mtp_layers({c.model.mtp_layers})",
    reason="The loss of prediction blocks takes all logits at once; there is no form in chunks.",
    source="torchtitan/models/deepseek_v3/mtp.py (MTPLoss)",
    allowed="loss auto or eager, or the model without prediction blocks (mtp_layers 0)",
)

PREDICTION_BLOCKS = predicate(
    "prediction-blocks",
    lambda c: everywhere(c, not c.model.mtp_layers) | ((c.batch.pp == 1) & (c.batch.cp == 1)),
    lambda c, i: f"mtp_layers({c.model.mtp_layers}) with pp({c.batch.pp[i]}) and cp({c.batch.cp[i]}), both must be 1",
    reason="Prediction blocks run neither in a pipeline nor with context parallelism.",
    source="torchtitan/models/deepseek_v3/mtp.py (MTPDecoder.Config.update_from_config)",
)

TIED_PIPELINE = predicate(
    "tied-embedding-pipeline",
    lambda c: everywhere(c, not c.model.tied) | (c.batch.pp == 1),
    lambda c, i: f"tied({c.model.tied}) with pp({c.batch.pp[i]}), must be 1",
    reason="A weight shared by embedding and head cannot lie on two pipeline stages.",
    source="torchtitan/models/common/decoder.py (Decoder.Config.update_from_config)",
    vary="pp",
)

KV_HEADS_OVER_TP = divisible(
    "kv-heads-over-tp",
    ("kv_heads",),
    ("tp",),
    reason="Every tensor-parallel rank holds whole key/value heads; they are not copied.",
    source="torchtitan/models/common/decoder.py (Decoder.Config.update_from_config)",
    when=lambda c: everywhere(c, c.model.mla is None),
    vary="tp",
)


def sequence_divisor(context: RuleContext) -> IntArray:
    """What the sequence length is a multiple of."""
    batch = context.batch
    tokens_over_tp = batch.sequence_parallel | (batch.ep > 1)
    return np.asarray(np.where(tokens_over_tp, batch.tp, 1) * np.where(batch.cp > 1, 2 * batch.cp, 1), dtype=np.int64)


SEQUENCE_DIVIDES = predicate(
    "sequence-divides",
    lambda c: c.job.seq_len % sequence_divisor(c) == 0,
    lambda c, i: (
        f"seq_len({c.job.seq_len}) % {sequence_divisor(c)[i]} = {c.job.seq_len % sequence_divisor(c)[i]}, must be 0 "
        f"with tp({c.batch.tp[i]}), cp({c.batch.cp[i]})"
    ),
    reason="Sequence parallelism splits tokens over tp, and context parallelism gives each rank two pieces of them.",
    source=f"{TRAINER} (Trainer.__init__)",
    vary="cp",
)


def _chunks(context: RuleContext) -> IntArray:
    return np.asarray(context.batch.cp * LOSS_CHUNKS, dtype=np.int64)


LOSS_IN_CHUNKS = predicate(
    "loss-in-chunks",
    lambda c: everywhere(c, c.job.loss == "eager" or c.model.mtp_layers > 0) | (c.job.seq_len % _chunks(c) == 0),
    lambda c, i: (
        f"seq_len({c.job.seq_len}) % (cp({c.batch.cp[i]}) * {LOSS_CHUNKS}) = {c.job.seq_len % _chunks(c)[i]}, must be 0"
    ),
    reason="The loss walks over the tokens of a rank in equal chunks, else every step fails.",
    source="torchtitan/components/loss.py (ChunkedLossWrapper)",
    vary="cp",
)

EXPERTS_OVER_EP = divisible(
    "experts-over-ep",
    ("experts",),
    ("ep",),
    reason="Each expert-parallel rank holds the same number of experts.",
    source="torchtitan/models/common/token_dispatcher.py",
    vary="ep",
)


def _expert_tensor_ranks(context: RuleContext) -> IntArray:
    spread = context.model.moe is not None
    return np.asarray(np.where((context.batch.ep == 1) & spread, context.batch.tp, 1), dtype=np.int64)


EXPERT_TENSOR = predicate(
    "expert-tensor-ranks",
    lambda c: c.batch.etp == _expert_tensor_ranks(c),
    lambda c, i: f"etp({c.batch.etp[i]}) with ep({c.batch.ep[i]}), must be {_expert_tensor_ranks(c)[i]}",
    reason="Experts that are spread (ep > 1) stay whole; otherwise tensor parallelism splits them as well.",
    source="torchtitan/models/common/moe_sharding.py",
    vary="etp",
)

EXPERT_RANKS = divisible(
    "expert-ranks",
    ("shard_degree", "tp"),
    ("ep",),
    reason="Experts borrow the ranks of one copy of the model: its shard group times tp.",
    source=f"{MESHES} (ParallelDims.build_mesh divides with a remainder silently)",
    vary="ep",
)

UNSHARDED_EXPERTS = predicate(
    "unsharded-experts",
    lambda c: (c.batch.ep == 1) | (c.batch.zero_stage > 0) | (c.batch.ep == c.batch.tp),
    lambda c, i: f"zero_stage(0) with ep({c.batch.ep[i]}), must be 1 or tp({c.batch.tp[i]})",
    reason="Expert weights are always sharded over the ranks of a copy that ep leaves, so replication leaves none.",
    source=FULLY_SHARD,
    vary="ep",
)


def _expert_shards(context: RuleContext) -> IntArray:
    batch = context.batch
    return np.asarray(np.where(batch.ep > 1, batch.shard_degree * batch.tp // batch.ep, batch.shard_degree))


def _experts_split_evenly(context: RuleContext) -> BoolArray:
    model, batch = context.model, context.batch
    if model.moe is None:
        return everywhere(context, True)
    shards = np.maximum(_expert_shards(context), 1)
    ranks = np.where(batch.ep > 1, batch.shard_degree * batch.tp, batch.dp * batch.cp)
    rows = model.moe.expert_ffn // np.maximum(batch.etp, 1)
    even = (model.hidden % shards == 0) & (rows % shards == 0) & (model.moe.expert_ffn % np.maximum(batch.etp, 1) == 0)
    return np.asarray((ranks <= model.moe.experts) | even, dtype=np.bool_)


EXPERT_ROWS = predicate(
    "expert-rows",
    _experts_split_evenly,
    lambda c, i: (
        f"expert_ffn({c.model.moe.expert_ffn if c.model.moe else 0}) / etp({c.batch.etp[i]}) and "
        f"hidden({c.model.hidden}) must be multiples of the {_expert_shards(c)[i]} shards of the experts"
    ),
    reason="With more ranks than experts the rows inside each expert are sharded, and FSDP refuses uneven rows.",
    source=f"{FULLY_SHARD}; torch/distributed/fsdp/_fully_shard/_fsdp_param.py",
    vary="shard_degree",
)

PIPELINE_FILLED = predicate(
    "pipeline-filled",
    lambda c: (c.batch.pp == 1) | (c.batch.vpp > 1) | (c.grad_accum >= c.batch.pp),
    lambda c, i: f"micro-batches({c.grad_accum[i]}) of a step >= pp({c.batch.pp[i]}) must hold",
    reason="The 1F1B schedule starts with one micro-batch in every stage.",
    source=f"{SCHEDULES_SOURCE} (Schedule1F1B)",
    vary="pp",
)


def rounds(context: RuleContext) -> IntArray:
    return np.asarray(np.maximum(context.grad_accum // context.batch.pp, 1), dtype=np.int64)


INTERLEAVED_ROUNDS = predicate(
    "interleaved-rounds",
    lambda c: (c.batch.vpp == 1) | (c.grad_accum % rounds(c) == 0),
    lambda c, i: (
        f"micro-batches({c.grad_accum[i]}) % rounds({rounds(c)[i]}) = {c.grad_accum[i] % rounds(c)[i]}, must be 0; "
        f"rounds are micro-batches / pp({c.batch.pp[i]}), rounded down"
    ),
    reason="The interleaved schedule runs whole rounds of micro-batches.",
    source=f"{SCHEDULES_SOURCE} (ScheduleInterleaved1F1B)",
    vary="micro_batch",
)

PIPELINE_SHARDING = predicate(
    "pipeline-sharding",
    lambda c: (c.batch.pp == 1) | (c.batch.zero_stage != 2),
    lambda c, i: f"zero_stage({c.batch.zero_stage[i]}) with pp({c.batch.pp[i]}), must be 0 or 3",
    reason=(
        "A pipeline keeps gathered weights by itself (fsdp_reshard_after_forward default), so stage 2 is what stage 3 "
        "already does there."
    ),
    source="torchtitan/distributed/fsdp.py (get_fsdp_reshard_after_forward_policy)",
)

RULES: tuple[Rule, ...] = (
    gpu_vendor("torchtitan"),
    MODEL_FAMILY,
    FLEX_ATTENTION,
    NUMBER_FORMATS,
    EXPERTS_IN_16_BITS,
    FP8_DENSE,
    WHOLE_WEIGHTS,
    LOSS_IMPLEMENTATION,
    PREDICTION_LOSS,
    *COMMON,
    STAGES_FILLED,
    PREDICTION_BLOCKS,
    TIED_PIPELINE,
    schedule_rule(
        {"single": ("none",), "plain": ("1f1b",), "virtual": ("interleaved",)},
        "torchtitan/distributed/pipeline_parallel.py",
    ),
    PIPELINE_FILLED,
    INTERLEAVED_ROUNDS,
    zero_stages((0, 2, 3), "fully_shard replicates (0), keeps gathered weights (2) or frees them (3).", FULLY_SHARD),
    PIPELINE_SHARDING,
    KEPT_WEIGHTS_NEED_SHARDS,
    NO_SECONDARY_SHARD,
    HEADS_OVER_TP,
    KV_HEADS_OVER_TP,
    SEQUENCE_PARALLEL_NEEDS_TP,
    SEQUENCE_DIVIDES,
    LOSS_IN_CHUNKS,
    SHARD_COVERS_CONTEXT,
    EXPERTS_OVER_EP,
    EXPERT_TENSOR,
    EXPERT_RANKS,
    UNSHARDED_EXPERTS,
    EXPERT_ROWS,
    OFFLOAD_WHOLE,
    OFFLOAD_NEEDS_SHARDING,
    fp8_alignment("torchtitan/components/quantization/float8.py (Float8LinearConverter)"),
)
