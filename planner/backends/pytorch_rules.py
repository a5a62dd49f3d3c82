"""What the validation run can train: limits of its decoder, of DTensor, FSDP2 and torch.distributed.pipelining.

Sources name files of torch 2.13, or of the package planner_validate."""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_SECONDARY_SHARD,
    SEQUENCE_PARALLEL_NEEDS_TP,
    STAGES_FILLED,
    schedule_rule,
    zero_stages,
)
from planner.backends.fsdp_rules import (
    CONTEXT_PARALLEL_SEQUENCE,
    FULLY_SHARD,
    KEPT_WEIGHTS_NEED_SHARDS,
    OFFLOAD_NEEDS_SHARDING,
    OFFLOAD_WHOLE,
    SEQUENCE_OVER_CP_TP,
    VOCAB_OVER_TP,
)
from planner.backends.rule_kit import divisible, everywhere, input_rule, predicate
from planner.backends.torchtitan_rules import INTERLEAVED_ROUNDS, PIPELINE_FILLED, rounds
from planner.specs.batch import SCHEDULES, BoolArray
from planner.specs.model import ModelSpec

LAYERS = "planner_validate/trainer/layers.py"
PARALLEL = "planner_validate/trainer/parallel.py"
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


def unsupported(model: ModelSpec, attended_tokens: int) -> str | None:
    """What of a model the run's decoder does not have, where ``attended_tokens`` attend to each other; None where it
    trains the whole of it."""
    kinds, moe, window = model.layer_kinds(), model.moe, model.window
    narrow = window is not None and window.size < attended_tokens
    one_norm = model.norms_per_layer == 3 or (model.norms_per_layer == 1 and not model.parallel_block)
    parts = {
        "Mamba or delta-net mixers": any(mixer in ("mamba", "gdn") for mixer, _ in kinds),
        "blocks of a mixer or an MLP alone": any("none" in kind for kind in kinds),
        f"windows narrower than the {attended_tokens} tokens that attend": narrow and ("window" in dict(kinds)),
        "ALiBi positions": model.position == "alibi",
        "attention sinks": model.sinks,
        "an attention gate": model.attention_gate,
        "prediction blocks (mtp_layers)": model.mtp_layers > 0,
        "a projected embedding": model.embedding_projections or model.embedding_width not in (0, model.hidden),
        "experts on a latent width": moe is not None and moe.latent > 0,
        "experts with biases": moe is not None and model.bias.mlp,
        f"{model.norms_per_layer} norms a layer": one_norm or (model.parallel_block and model.norms_per_layer > 2),
        "rotary positions on heads of an odd width": model.position == "rope" and _rotary_width(model) % 2 == 1,
        "latent attention without rotary positions": model.mla is not None and model.position != "rope",
    }
    return ", ".join(name for name, is_there in parts.items() if is_there) or None


def _rotary_width(model: ModelSpec) -> int:
    return model.mla.qk_rope if model.mla is not None else model.head_dim


MODEL_PARTS = input_rule(
    "model-parts",
    lambda c: unsupported(c.model, c.job.attended_tokens) is None,
    lambda c: f"model {c.model.name} has {unsupported(c.model, c.job.attended_tokens)}",
    reason=(
        "The run's decoder has attention over all tokens, grouped-query or latent, and gated or plain MLPs or experts."
    ),
    source=LAYERS,
    allowed="models like GPT, Llama, Mistral, Qwen, Mixtral, DeepSeek-V2 and V3 (mtp_layers 0)",
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
    source="planner_validate/trainer/training.py",
    allowed="loss in auto, eager",
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
    source="planner_validate/trainer/experts.py",
    vary="ep",
)

EXPERTS_ARE_WHOLE = predicate(
    "experts-are-whole",
    lambda c: c.batch.etp == 1,
    lambda c, i: f"etp({c.batch.etp[i]}), must be 1",
    reason="The run splits the matrices of dense blocks over tp; experts stay whole and are spread over ep.",
    source=PARALLEL,
    vary="etp",
    limit="planner",
)

EXPERT_TOKENS = predicate(
    "expert-tokens",
    lambda c: everywhere(c, c.model.moe is None) | (c.batch.tp == 1) | c.batch.sequence_parallel,
    lambda c, i: (
        f"tp({c.batch.tp[i]}) with experts and sequence_parallel({c.batch.sequence_parallel[i]}), must be true"
    ),
    reason="Every rank routes tokens of its own, so tensor-parallel ranks have to share them out.",
    source=PARALLEL,
    vary="tp",
)

WHOLE_BESIDE_TP = predicate(
    "whole-beside-tp",
    lambda c: (c.batch.tp == 1) | everywhere(c, _splits(c.model)),
    lambda c, i: f"tp({c.batch.tp[i]}) with position {c.model.position} and qk_norm {c.model.qk_norm}; tp must be 1",
    reason="Learned positions and norms over all queries are not split over tensor-parallel ranks.",
    source=PARALLEL,
    vary="tp",
    limit="planner",
)

EXPERT_RANKS = divisible(
    "expert-ranks",
    ("tp", "cp", "dp"),
    ("ep",),
    reason="Experts are spread over neighbouring ranks of one pipeline stage.",
    source=PARALLEL,
    vary="ep",
)


def _splits(model: ModelSpec) -> bool:
    return model.position in ("rope", "none") and model.qk_norm != "full"


PRECISION = input_rule(
    "precision-offered",
    lambda c: c.job.precision in ("bf16", "fp16", "fp32"),
    lambda c: f"precision {c.job.precision}",
    reason="The run multiplies matrices in 16 or 32 bits; 8- and 4-bit formats need packages beside torch.",
    source=LAYERS,
    allowed="precision in bf16, fp16, fp32",
    limit="planner",
)

SAMPLES_FILL_SEQUENCES = input_rule(
    "samples-fill-sequences",
    lambda c: c.job.seq_len % c.job.attended_tokens == 0,
    lambda c: (
        f"seq_len({c.job.seq_len}) % sample_tokens({c.job.attended_tokens}) = "
        f"{c.job.seq_len % c.job.attended_tokens}, must be 0"
    ),
    reason="Packed samples are all of one length, so that attention stays within them.",
    source=LAYERS,
    limit="planner",
)

TIED_PIPELINE = predicate(
    "tied-embedding-pipeline",
    lambda c: everywhere(c, not c.model.tied) | (c.batch.pp == 1),
    lambda c, i: f"tied({c.model.tied}) with pp({c.batch.pp[i]}), must be 1",
    reason="A pipeline of torch does not tie a weight that lies on two stages.",
    source="torch/distributed/pipelining/stage.py",
    vary="pp",
)

ZERO_BUBBLE_KEEPS_ACTIVATIONS = predicate(
    "zero-bubble-recompute",
    lambda c: ~_zero_bubble(c) | ~np.array([kind.mode != "none" for kind in c.kinds])[c.batch.recompute_kind],
    lambda c, i: f"zb-h1 with recompute({c.kinds[int(c.batch.recompute_kind[i])].id}), must be none",
    reason="Input and weight gradients are two passes over one graph: torch refuses the second where recomputation is "
    "selective, and repeats and keeps all of a layer in both where it is full.",
    source="torch/utils/checkpoint.py; torch/distributed/pipelining/_backward.py",
    vary="schedule",
)

ZERO_BUBBLE_ROUNDS = predicate(
    "zero-bubble-rounds",
    lambda c: ~_zero_bubble(c) | (c.grad_accum % rounds(c) == 0),
    lambda c, i: (
        f"micro-batches({c.grad_accum[i]}) % rounds({rounds(c)[i]}) = {c.grad_accum[i] % rounds(c)[i]}, must be 0; "
        f"rounds are micro-batches / pp({c.batch.pp[i]}), rounded down"
    ),
    reason="The zero-bubble schedule runs whole rounds of micro-batches.",
    source="torch/distributed/pipelining/schedules.py (ScheduleInterleavedZeroBubble)",
    vary="micro_batch",
)


def _zero_bubble(context: RuleContext) -> BoolArray:
    return np.asarray(context.batch.schedule == SCHEDULES.index("zb-h1"))


WHOLE_SEQUENCES = predicate(
    "whole-sequences",
    lambda c: (c.batch.cp == 1) | everywhere(c, _spans_ranks(c)),
    lambda c, i: (
        f"cp({c.batch.cp[i]}) with position {c.model.position}, samples of {c.job.attended_tokens} of {c.job.seq_len} "
        f"tokens, flash_attention({c.job.flash_attention}); cp must be 1"
    ),
    reason="Ranks that share a sequence attend to all of it by fused attention, with rotary positions or none.",
    source="planner_validate/trainer/context.py",
    vary="cp",
    limit="planner",
)


def _spans_ranks(context: RuleContext) -> bool:
    whole = context.job.attended_tokens == context.job.seq_len
    return whole and context.job.flash_attention and context.model.position in ("rope", "none")


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
    PRECISION,
    SAMPLES_FILL_SEQUENCES,
    *COMMON,
    STAGES_FILLED,
    TIED_PIPELINE,
    ZERO_BUBBLE_KEEPS_ACTIVATIONS,
    ZERO_BUBBLE_ROUNDS,
    schedule_rule(
        {"single": ("none",), "plain": ("1f1b", "gpipe", "zb-h1"), "virtual": ("interleaved",)},
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
    WHOLE_SEQUENCES,
    WHOLE_BESIDE_TP,
    EXPERTS_ARE_WHOLE,
    EXPERT_TOKENS,
    EXPERTS_OVER_EP,
    EXPERT_RANKS,
    OFFLOAD_WHOLE,
    OFFLOAD_NEEDS_SHARDING,
    NO_OFFLOAD_ON_CPU,
)
