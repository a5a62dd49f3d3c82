"""What a nanotron plan can hold: limits of its configuration checks, of its Llama and Qwen2 models, of its pipeline
engines and of its parallel context.

Most of them are raised only when the job starts; the configuration loader accepts such a file.
"""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_SECONDARY_SHARD,
    SEQUENCE_PARALLEL_NEEDS_TP,
    STAGES_FILLED,
    gpu_vendor,
    schedule_rule,
    zero_stages,
)
from planner.backends.rule_kit import at_most, divisible, everywhere, input_rule, predicate, written
from planner.specs.batch import SCHEDULES, BoolArray
from planner.specs.model import ModelSpec

CONFIG = "nanotron/config/config.py (Config.__post_init__)"
CONTEXT = "nanotron/parallel/context.py (ParallelContext)"
ENGINE = "nanotron/parallel/pipeline_parallel/engine.py (OneForwardOneBackwardPipelineEngine)"
LLAMA = "nanotron/models/llama.py"
QWEN2 = "nanotron/models/qwen.py"
TENSOR_PARALLEL = "nanotron/parallel/tensor_parallel"
TRAINER = "nanotron/trainer.py"


def needs_qwen2(model: ModelSpec, cp: int) -> bool:
    """Whether the Qwen2 model is written: only it has biases on query, key and value, and context parallelism."""
    return model.bias.qkv or cp > 1


def _departures(model: ModelSpec) -> list[str]:
    """What a model has that neither the Llama nor the Qwen2 class of nanotron can build."""
    found = {
        f"layers of kinds {', '.join(sorted({f'{mixer}/{mlp}' for mixer, mlp in model.layer_kinds()}))}": any(
            kind != ("attention", "dense") for kind in model.layer_kinds()
        ),
        f"head_dim({model.head_dim}) * heads({model.heads}) != hidden({model.hidden})": (
            model.head_dim * model.heads != model.hidden
        ),
        f"position {model.position}": model.position != "rope",
        f"norm {model.norm}": model.norm != "rmsnorm" or model.norms_per_layer != 2 or not model.final_norm,
        f"qk_norm {model.qk_norm}": model.qk_norm != "none",
        "an MLP without a gate": not model.gated_mlp,
        f"activation {model.activation}": model.activation not in ("silu", "gelu", "relu", "relu2"),
        "biases outside query, key and value": model.bias.out or model.bias.mlp or model.head_bias,
        "prediction blocks": model.mtp_layers > 0,
        "an embedding of another width": model.embedding_width not in (0, model.hidden) or model.embedding_projections,
        "attention sinks or gates, or parallel blocks": model.sinks or model.attention_gate or model.parallel_block,
        "a norm on the embedding": model.embedding_norm,
    }
    return [name for name, present in found.items() if present]


MODEL_CLASS = input_rule(
    "model-class",
    lambda c: not _departures(c.model),
    lambda c: f"{c.model.name} has {'; '.join(_departures(c.model))}",
    reason=(
        "Plans are written for the dense Llama and Qwen2 models of nanotron: full attention with rotary positions, "
        "RMSNorm, a gated MLP, heads that fill the hidden size."
    ),
    source=f"{LLAMA}, {QWEN2}; nanotron/nn/moe.py splits no expert over tp",
    allowed="Llama-like and Qwen2 models",
    limit="planner",
)

PRECISION = input_rule(
    "precision-bf16",
    lambda c: c.job.precision == "bf16",
    lambda c: f"precision {c.job.precision}",
    reason="FlashAttention takes 16 bits only, fp16 would need a loss scaler that nanotron lacks, and its models use "
    "none of its fp8 layers.",
    source=f"{LLAMA} (flash_attn_varlen_func); nanotron/fp8 is imported by no model",
    allowed="precision in bf16",
)

FLASH_ATTENTION = input_rule(
    "flash-attention-only",
    lambda c: c.job.flash_attention,
    lambda c: f"flash_attention({c.job.flash_attention})",
    reason="Both models call FlashAttention whatever their configuration names as attention.",
    source=f"{LLAMA} (CoreAttention.forward), {QWEN2} (Qwen2Attention._forward_packed)",
    allowed="flash_attention true",
)

LOSS_IMPLEMENTATION = input_rule(
    "loss-implementation",
    lambda c: c.job.loss in ("auto", "eager"),
    lambda c: f"loss {c.job.loss}",
    reason="The cross entropy over the split vocabulary runs operator by operator; there is no fused or chunked one.",
    source=f"{TENSOR_PARALLEL}/functional.py (sharded_cross_entropy)",
    allowed="loss in auto, eager",
)

FULL_TRAINING = input_rule(
    "full-training-only",
    lambda c: c.job.task != "lora",
    lambda c: f"task {c.job.task}",
    reason="There are no adapters: every parameter is trained.",
    source=TRAINER,
    allowed="task in pretrain, sft",
)

NO_CHUNKS = predicate(
    "no-virtual-stages",
    lambda c: c.batch.vpp == 1,
    lambda c, i: f"vpp({c.batch.vpp[i]}), must be 1",
    reason="A pipeline rank holds one run of layers; there is no interleaved engine.",
    source="nanotron/config/utils_config.py (cast_str_to_pipeline_engine)",
)

NO_EXPERTS = predicate(
    "no-expert-parallel",
    lambda c: (c.batch.ep == 1) & (c.batch.etp == 1),
    lambda c, i: f"{written(c, i, ('ep', 'etp'))} = {c.batch.ep[i] * c.batch.etp[i]}, must be 1",
    reason="The rank grid has an expert axis that the product of degrees leaves out, so expert_parallel_size > 1 "
    "cannot start.",
    source=f"{CONTEXT}._init_parallel_groups",
    vary="ep",
)

KV_HEADS_COVER_TP = at_most(
    "kv-heads-cover-tp",
    ("tp",),
    ("kv_heads",),
    reason="Key/value heads are not repeated, so every tensor-parallel rank needs one of its own.",
    source=CONFIG,
    vary="tp",
)

KV_HEADS_OVER_TP = divisible(
    "kv-heads-over-tp",
    ("kv_heads",),
    ("tp",),
    reason="Every tensor-parallel rank holds the same whole number of key/value heads.",
    source=f"{LLAMA} (CausalSelfAttention)",
    vary="tp",
)

FFN_OVER_TP = divisible(
    "ffn-over-tp",
    ("ffn",),
    ("tp",),
    reason="The matrices of the MLP are split into equal parts.",
    source=f"{TENSOR_PARALLEL}/nn.py (TensorParallelColumnLinear)",
    vary="tp",
)

SEQUENCE_OVER_CP_TP = divisible(
    "sequence-parallel-sequence",
    ("seq_len",),
    ("cp", "tp"),
    reason="REDUCE_SCATTER splits the tokens of a sequence (of its context-parallel part) evenly over tp.",
    source=f"{TENSOR_PARALLEL}/distributed_differentiable_primitives.py (DifferentiableReduceScatterSum)",
    when=lambda c: c.batch.sequence_parallel,
    vary="tp",
)

CONTEXT_SEQUENCE = divisible(
    "context-parallel-sequence",
    ("seq_len",),
    (2, "cp"),
    reason="Its ring attention takes two equal pieces of the sequence for each context-parallel rank.",
    source=f"{QWEN2} (Qwen2Model.forward)",
    when=lambda c: c.batch.cp > 1,
    vary="cp",
)


def _qwen2_whole(context: RuleContext) -> BoolArray:
    qwen2 = (context.batch.cp > 1) | everywhere(context, context.model.bias.qkv)
    return np.asarray(~qwen2 | (context.batch.pp == 1), dtype=np.bool_)


QWEN2_WITHOUT_PIPELINE = predicate(
    "qwen2-without-pipeline",
    _qwen2_whole,
    lambda c, i: (
        f"pp({c.batch.pp[i]}) with cp({c.batch.cp[i]}) and bias on query, key and value "
        f"({str(c.model.bias.qkv).lower()}), must be 1"
    ),
    reason="Context parallelism and biases exist in the Qwen2 model only, whose forward pass counts position ids that "
    "later stages do not have.",
    source=f"{QWEN2} (Qwen2Model.forward: position_ids.numel())",
    vary="pp",
)

CONTEXT_REPLICAS = predicate(
    "context-parallel-replicas",
    lambda c: (c.batch.cp == 1) | (c.batch.dp > 1) | (c.batch.zero_stage == 0),
    lambda c, i: f"cp({c.batch.cp[i]}) with dp({c.batch.dp[i]}) and zero_stage({c.batch.zero_stage[i]})",
    reason="With one replica and sharded states the model is not wrapped in DistributedDataParallel, and without it "
    "context-parallel gradients cannot be reduced.",
    source=f"{TRAINER} (DistributedTrainer._init_model, training_step)",
)


def _micro_batches_fill(context: RuleContext) -> BoolArray:
    alternating = context.batch.schedule == SCHEDULES.index("1f1b")
    return np.asarray(~alternating | (context.grad_accum >= context.batch.pp - 1), dtype=np.bool_)


def _enough_micro_batches(context: RuleContext, index: int) -> str:
    """The smallest accumulation that starts, and the one that keeps the bubble small."""
    b = context.batch
    least = int(b.pp[index]) - 1
    batch = least * int(b.micro_batch[index] * b.dp[index])
    return (
        f"batch_accumulation_per_replica of {least} or more (a global batch of {batch} at this micro-batch); "
        f"{4 * (least + 1)} keep the bubble small"
    )


MICRO_BATCHES = Rule(
    "micro-batches-fill-pipeline",
    "Alternating forward and backward passes (1f1b) needs batch_accumulation_per_replica of at least pp - 1.",
    ENGINE,
    _micro_batches_fill,
    lambda c, i: f"micro-batches({c.grad_accum[i]}) >= pp({c.batch.pp[i]}) - 1 must hold",
    _enough_micro_batches,
)

SHARD_OVER_REPLICAS = predicate(
    "shard-over-replicas",
    lambda c: (c.batch.zero_stage == 0) | (c.batch.shard_degree == c.batch.dp),
    lambda c, i: f"shard_degree({c.batch.shard_degree[i]}), must be dp({c.batch.dp[i]})",
    reason="Optimizer states are spread over all data-parallel replicas, and not over context-parallel ranks.",
    source="nanotron/helpers.py (init_optimizer_and_grad_accumulator: dp_pg)",
    vary="shard_degree",
)

NO_OFFLOAD = predicate(
    "no-offload",
    lambda c: (c.batch.offload_optimizer == 0) & (c.batch.offload_parameters == 0),
    lambda c, i: f"offload share({c.batch.offload_optimizer[i]:g}), must be 0",
    reason="Weights, gradients and optimizer states stay on the GPU.",
    source="nanotron/optim",
)


def layers_by_cost(model: ModelSpec, pp: int, *, tie_closes: bool = False) -> tuple[int, ...]:
    """Layers of each stage as nanotron hands out blocks: by the weights they multiply with, the head included.

    A stage is closed by the block with which the running cost exceeds its share (nanotron/models/base.py, build_model;
    costs from get_block_compute_costs of the models), or reaches it where ``tie_closes``.  The last stages can be left
    without layers: with the head alone, or with nothing at all, which DistributedDataParallel refuses.
    """
    layer = 4 * model.heads * model.head_dim * model.hidden + 3 * model.ffn * model.hidden
    total = model.layers * layer + model.vocab * model.hidden
    counts, stage = [0] * pp, 0
    for index in range(model.layers):
        counts[stage] += 1
        cost, share = (index + 1) * layer * pp, total * (stage + 1)
        if stage < pp - 1 and (cost > share or (tie_closes and cost == share)):
            stage += 1
    return tuple(counts)


def _follows_own_split(context: RuleContext) -> BoolArray:
    batch = context.batch
    held = (batch.pp == 1) | (batch.vpp > 1)
    for pp in np.unique(batch.pp[~held]):
        own = np.zeros(max(batch.stage_layers.shape[1], int(pp)), dtype=np.int64)
        own[:pp] = layers_by_cost(context.model, int(pp))
        width = batch.stage_layers.shape[1]
        held |= (batch.pp == pp) & (batch.stage_layers == own[:width]).all(axis=1) & ~own[width:].any()
    return np.asarray(held, dtype=np.bool_)


PIPELINE_LAYOUT = predicate(
    "pipeline-layout",
    _follows_own_split,
    lambda c, i: (
        f"layers_per_stage = {[int(n) for n in c.batch.stage_layers[i] if n]}, "
        f"must be {list(layers_by_cost(c.model, int(c.batch.pp[i])))}"
    ),
    reason="Blocks are handed to the stages by their cost, the head included; no setting says otherwise.",
    source="nanotron/models/base.py (build_model)",
)

RULES: tuple[Rule, ...] = (
    gpu_vendor("nanotron"),
    MODEL_CLASS,
    PRECISION,
    FLASH_ATTENTION,
    LOSS_IMPLEMENTATION,
    FULL_TRAINING,
    *COMMON,
    STAGES_FILLED,
    schedule_rule(
        {"single": ("none",), "plain": ("1f1b", "gpipe"), "virtual": ()},
        "nanotron/config/utils_config.py (1f1b, afab)",
    ),
    zero_stages((0, 1), "Optimizer states are sharded or not; any stage above 1 is silently 1.", "nanotron/helpers.py"),
    NO_CHUNKS,
    PIPELINE_LAYOUT,
    NO_EXPERTS,
    NO_SECONDARY_SHARD,
    NO_OFFLOAD,
    HEADS_OVER_TP,
    KV_HEADS_COVER_TP,
    KV_HEADS_OVER_TP,
    FFN_OVER_TP,
    SEQUENCE_PARALLEL_NEEDS_TP,
    SEQUENCE_OVER_CP_TP,
    CONTEXT_SEQUENCE,
    QWEN2_WITHOUT_PIPELINE,
    CONTEXT_REPLICAS,
    MICRO_BATCHES,
    SHARD_OVER_REPLICAS,
)
