"""What the validation run can train: limits of its decoder, of DTensor, FSDP2 and torch.distributed.pipelining.

Sources name files of torch 2.13, or of the package planner_validate."""

from __future__ import annotations

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_SECONDARY_SHARD,
    SEQUENCE_PARALLEL_NEEDS_TP,
    fp8_alignment,
    schedule_rule,
    zero_stages,
)
from planner.backends.fsdp_rules import (
    CONTEXT_PARALLEL_ATTENTION,
    CONTEXT_PARALLEL_SEQUENCE,
    FP8_DENSE,
    FULLY_SHARD,
    KEPT_WEIGHTS_NEED_SHARDS,
    NO_FP4,
    OFFLOAD_NEEDS_SHARDING,
    OFFLOAD_WHOLE,
    SEQUENCE_OVER_CP_TP,
    SHARD_COVERS_CONTEXT,
    VOCAB_OVER_TP,
)
from planner.backends.rule_kit import divisible, everywhere, input_rule, predicate
from planner.backends.torchtitan_rules import INTERLEAVED_ROUNDS, PIPELINE_FILLED
from planner.specs.model import ModelSpec

LAYERS = "planner_validate/layers.py"
VENDORS = ("nvidia", "amd", "cpu")

DEVICES_THAT_TRAIN = input_rule(
    "gpu-vendor",
    lambda c: c.cluster.accelerator.vendor.lower() in VENDORS,
    lambda c: f"accelerator {c.cluster.accelerator.id} is from vendor {c.cluster.accelerator.vendor!r}",
    reason="The run takes what torch calls cuda (NVIDIA and AMD GPUs) or the processor itself.",
    source="scope of this backend",
    allowed=f"vendor in {', '.join(VENDORS)}",
    limit="planner",
)


def unsupported(model: ModelSpec) -> str | None:
    """What of a model the run's decoder does not have; None where it trains the whole of it."""
    mixers = {mixer for mixer, _ in model.layer_kinds()}
    parts = {
        f"mixers {', '.join(sorted(mixers - {'attention', 'mla'}))}": bool(mixers - {"attention", "mla"}),
        "layers without an MLP or a mixer": any("none" in kind for kind in model.layer_kinds()),
        f"position {model.position}": model.position not in ("rope", "none"),
        f"norm {model.norm}": model.norm != "rmsnorm",
        f"{model.norms_per_layer} norms a layer": model.norms_per_layer != 2,
        f"qk_norm {model.qk_norm}": model.qk_norm == "full",
        "attention sinks": model.sinks,
        "an attention gate": model.attention_gate,
        "a parallel block": model.parallel_block,
        "prediction blocks": model.mtp_layers > 0,
        "a projected embedding": model.embedding_projections or model.embedding_width not in (0, model.hidden),
        "an embedding norm": model.embedding_norm,
        "a head bias": model.head_bias,
        "no final norm": not model.final_norm,
        "experts on a latent width": model.moe is not None and model.moe.latent > 0,
    }
    found = [name for name, is_there in parts.items() if is_there]
    return ", ".join(found) or None


MODEL_PARTS = input_rule(
    "model-parts",
    lambda c: unsupported(c.model) is None,
    lambda c: f"model {c.model.name} has {unsupported(c.model)}",
    reason=(
        "The run's decoder has pre-norm blocks of grouped-query or latent attention with rotary positions, and gated "
        "or plain MLPs or experts."
    ),
    source=LAYERS,
    allowed="models like Llama, Mistral, Qwen, Mixtral, DeepSeek-V2 and V3 (mtp_layers 0)",
    limit="planner",
)

WHOLE_WEIGHTS = input_rule(
    "no-adapters",
    lambda c: c.job.task != "lora",
    lambda c: f"task {c.job.task}",
    reason="The run trains all weights and adds no adapters.",
    source=LAYERS,
    allowed="task in pretrain, sft",
    limit="planner",
)

LOSS_IMPLEMENTATION = input_rule(
    "loss-implementation",
    lambda c: c.job.loss in ("auto", "eager"),
    lambda c: f"loss {c.job.loss}",
    reason="The run computes the eager cross entropy.",
    source="planner_validate/training.py",
    allowed="loss in auto, eager",
    limit="planner",
)

FLASH_ATTENTION = input_rule(
    "flash-attention",
    lambda c: c.job.flash_attention,
    lambda c: f"flash_attention({c.job.flash_attention})",
    reason="Attention is torch's scaled_dot_product_attention, which does not store its scores.",
    source=LAYERS,
    allowed="flash_attention true",
    limit="planner",
)

KV_HEADS_OVER_TP = divisible(
    "kv-heads-over-tp",
    ("kv_heads",),
    ("tp",),
    reason="Every tensor-parallel rank holds whole key/value heads; they are not copied.",
    source=LAYERS,
    when=lambda c: everywhere(c, c.model.mla is None),
    vary="tp",
)

EXPERTS_OVER_EP = divisible(
    "experts-over-ep",
    ("experts",),
    ("ep",),
    reason="Each expert-parallel rank holds the same number of experts.",
    source="planner_validate/experts.py",
    vary="ep",
)

EXPERTS_ARE_WHOLE = predicate(
    "experts-are-whole",
    lambda c: (c.batch.etp == 1) & (everywhere(c, c.model.moe is None and c.model.mla is None) | (c.batch.tp == 1)),
    lambda c, i: (
        f"etp({c.batch.etp[i]}), tp({c.batch.tp[i]}) with experts({c.model.moe.experts if c.model.moe else 0}) and "
        f"latent attention({c.model.mla is not None}); both must be 1"
    ),
    reason="The run splits the matrices of dense Llama-like layers over tp; experts and latent attention stay whole.",
    source="planner_validate/parallel.py",
    vary="tp",
    limit="planner",
)

EXPERT_RANKS = predicate(
    "expert-ranks",
    lambda c: (c.batch.ep == 1) | ((c.batch.dp % c.batch.ep == 0) & (c.batch.cp == 1)),
    lambda c, i: (
        f"dp({c.batch.dp[i]}) % ep({c.batch.ep[i]}) = {c.batch.dp[i] % c.batch.ep[i]}, must be 0; "
        f"cp({c.batch.cp[i]}), must be 1"
    ),
    reason="Experts are spread over neighbouring data-parallel ranks.",
    source="planner_validate/parallel.py",
    vary="ep",
)

EXPERT_BALANCE = predicate(
    "expert-balance",
    lambda c: (
        everywhere(c, c.model.moe is None)
        | ((c.batch.micro_batch * c.job.seq_len * (c.model.moe.top_k if c.model.moe else 1)) % _experts(c) == 0)
    ),
    lambda c, i: (
        f"micro_batch({c.batch.micro_batch[i]}) * seq_len({c.job.seq_len}) * top_k % experts({_experts(c)}) must be 0"
    ),
    reason="The run forces a balanced routing: every expert gets the same number of tokens of a micro-batch.",
    source="planner_validate/experts.py",
    vary="micro_batch",
)


def _experts(context: RuleContext) -> int:
    return context.model.moe.experts if context.model.moe is not None else 1


TIED_PIPELINE = predicate(
    "tied-embedding-pipeline",
    lambda c: everywhere(c, not c.model.tied) | (c.batch.pp == 1),
    lambda c, i: f"tied({c.model.tied}) with pp({c.batch.pp[i]}), must be 1",
    reason="A pipeline of torch does not tie a weight that lies on two stages.",
    source="torch/distributed/pipelining/stage.py",
    vary="pp",
)

NO_CONTEXT_ON_CPU = predicate(
    "context-parallel-needs-gpu",
    lambda c: (c.batch.cp == 1) | everywhere(c, not c.cluster.accelerator.synchronous),
    lambda c, i: f"cp({c.batch.cp[i]}) on {c.cluster.accelerator.id}, must be 1",
    reason="Ring attention has no kernel for the processor.",
    source="torch/distributed/tensor/experimental/_context_parallel",
    vary="cp",
)

NO_OFFLOAD_ON_CPU = predicate(
    "offload-needs-gpu",
    lambda c: (c.batch.offload_optimizer == 0) | everywhere(c, not c.cluster.accelerator.synchronous),
    lambda c, i: f"offload share({c.batch.offload_optimizer[i]:g}) on {c.cluster.accelerator.id}, must be 0",
    reason="Host memory is where a processor computes already.",
    source=FULLY_SHARD,
)

RULES: tuple[Rule, ...] = (
    DEVICES_THAT_TRAIN,
    MODEL_PARTS,
    WHOLE_WEIGHTS,
    LOSS_IMPLEMENTATION,
    FLASH_ATTENTION,
    FP8_DENSE,
    NO_FP4,
    *COMMON,
    TIED_PIPELINE,
    schedule_rule(
        {"single": ("none",), "plain": ("1f1b", "gpipe"), "virtual": ("interleaved",)},
        "torch/distributed/pipelining/schedules.py",
    ),
    PIPELINE_FILLED,
    INTERLEAVED_ROUNDS,
    zero_stages(
        (0, 2, 3),
        "Plain data parallelism (0), or fully_shard with gathered weights kept (2) or freed (3).",
        FULLY_SHARD,
    ),
    KEPT_WEIGHTS_NEED_SHARDS,
    NO_SECONDARY_SHARD,
    HEADS_OVER_TP,
    KV_HEADS_OVER_TP,
    VOCAB_OVER_TP,
    SEQUENCE_PARALLEL_NEEDS_TP,
    SEQUENCE_OVER_CP_TP,
    CONTEXT_PARALLEL_SEQUENCE,
    CONTEXT_PARALLEL_ATTENTION,
    NO_CONTEXT_ON_CPU,
    SHARD_COVERS_CONTEXT,
    EXPERTS_ARE_WHOLE,
    EXPERTS_OVER_EP,
    EXPERT_RANKS,
    EXPERT_BALANCE,
    OFFLOAD_WHOLE,
    OFFLOAD_NEEDS_SHARDING,
    NO_OFFLOAD_ON_CPU,
    fp8_alignment("torchao.float8 (dimension check of scaled matrix multiplications)"),
)
