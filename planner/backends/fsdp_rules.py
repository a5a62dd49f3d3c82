"""What an FSDP2 plan can hold: limits of fully_shard, of DTensor tensor parallelism, of context_parallel and of the
written module."""

from __future__ import annotations

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.backends.common_rules import (
    COMMON,
    HEADS_OVER_TP,
    NO_EXPERT_PARALLEL,
    NO_SECONDARY_SHARD,
    SEQUENCE_PARALLEL_NEEDS_TP,
    STAGES_FILLED,
    fp8_alignment,
    gpu_vendor,
    schedule_rule,
    zero_stages,
)
from planner.backends.rule_kit import divisible, everywhere, input_rule, predicate
from planner.specs.batch import DEVICES, BoolArray

FULLY_SHARD = "torch.distributed.fsdp.fully_shard"
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental context_parallel"
TENSOR_PLAN = "the written tensor-parallel plan (DTensor parallelize_module)"

NO_PIPELINE = predicate(
    "no-pipeline",
    lambda c: c.batch.pp == 1,
    lambda c, i: f"pp({c.batch.pp[i]}), must be 1",
    reason=(
        "FSDP under torch pipelining keeps 6 bytes of every stage parameter unsharded; the written module has no "
        "pipeline."
    ),
    source="torch/distributed/pipelining/stage.py",
    vary="pp",
)

NO_VIRTUAL_STAGES = predicate(
    "no-virtual-stages",
    lambda c: c.batch.vpp == 1,
    lambda c, i: f"vpp({c.batch.vpp[i]}), must be 1",
    reason="Without a pipeline there are no virtual stages.",
    source="torch/distributed/pipelining/stage.py",
    vary="vpp",
)

KV_HEADS_OVER_TP = divisible(
    "kv-heads-over-tp",
    ("kv_heads",),
    ("tp",),
    reason="The attention view of a DTensor needs whole key/value heads on every tensor-parallel rank.",
    source=TENSOR_PLAN,
    when=lambda c: everywhere(c, c.model.mla is None),
    vary="tp",
)

VOCAB_OVER_TP = divisible(
    "vocab-over-tp",
    ("vocab",),
    ("tp",),
    reason="The loss over a split vocabulary needs the same number of logits on every tensor-parallel rank.",
    source="torch.distributed.tensor.parallel.loss_parallel",
    vary="tp",
)

SEQUENCE_OVER_CP_TP = divisible(
    "sequence-parallel-sequence",
    ("seq_len",),
    ("cp", "tp"),
    reason="Sequence parallelism shards the tokens of a context-parallel rank evenly over tp.",
    source=TENSOR_PLAN,
    when=lambda c: c.batch.sequence_parallel,
    vary="tp",
)

CONTEXT_PARALLEL_SEQUENCE = divisible(
    "context-parallel-sequence",
    ("seq_len",),
    (2, "cp"),
    reason="The head-tail load balancer gives each context-parallel rank two chunks of the sequence.",
    source=CONTEXT_PARALLEL,
    when=lambda c: c.batch.cp > 1,
    vary="cp",
)


def _ring_attention_fits(context: RuleContext) -> bool:
    model = context.model
    plain = all(mixer in ("attention", "none") for mixer, _ in model.layer_kinds())
    return context.job.flash_attention and plain and model.position != "alibi" and not model.sinks


CONTEXT_PARALLEL_ATTENTION = predicate(
    "context-parallel-attention",
    lambda c: (c.batch.cp == 1) | everywhere(c, _ring_attention_fits(c)),
    lambda c, i: (
        f"cp({c.batch.cp[i]}) with mixers {', '.join(sorted({mixer for mixer, _ in c.model.layer_kinds()}))}, "
        f"position {c.model.position}, sinks({c.model.sinks}), flash_attention({c.job.flash_attention})"
    ),
    reason="Ring attention exists for full causal attention through the fused scaled-dot-product kernels only.",
    source=CONTEXT_PARALLEL,
    vary="cp",
)


def _tensor_plan_fits(context: RuleContext) -> bool:
    model = context.model
    plain = all(mixer in ("attention", "window") and mlp == "dense" for mixer, mlp in model.layer_kinds())
    return plain and not model.sinks and model.qk_norm != "full" and model.position in ("rope", "none")


def _tensor_plan_text(context: RuleContext, index: int) -> str:
    model = context.model
    kinds = ", ".join(sorted({f"{mixer}/{mlp}" for mixer, mlp in model.layer_kinds()}))
    return f"tp({context.batch.tp[index]}) with layers {kinds}, position {model.position}, qk_norm {model.qk_norm}"


TENSOR_PARALLEL_MODEL = predicate(
    "tensor-parallel-model",
    lambda c: (c.batch.tp == 1) | everywhere(c, _tensor_plan_fits(c)),
    _tensor_plan_text,
    reason=(
        "The tensor-parallel plan splits the matrices of Llama-like layers; experts and other mixers are not "
        "among them."
    ),
    source=TENSOR_PLAN,
    vary="tp",
    limit="planner",
)

SHARD_COVERS_CONTEXT = divisible(
    "shard-covers-context",
    ("shard_degree",),
    ("cp",),
    reason="Context-parallel ranks hold the same weights and are flattened into the shard group, so it holds them all.",
    source="written device mesh",
    vary="shard_degree",
)


def _whole_offload(context: RuleContext) -> BoolArray:
    batch, cpu = context.batch, DEVICES.index("cpu")
    nothing = (batch.offload_optimizer == 0) & (batch.offload_parameters == 0)
    everything = (batch.offload_optimizer == 1) & (batch.offload_parameters == cpu) & (batch.offload_device == cpu)
    return np.asarray(nothing | everything, dtype=np.bool_)


OFFLOAD_WHOLE = predicate(
    "offload-all-or-nothing",
    _whole_offload,
    lambda c, i: (
        f"optimizer share({c.batch.offload_optimizer[i]:g}) on {DEVICES[c.batch.offload_device[i]]}, "
        f"parameters on {DEVICES[c.batch.offload_parameters[i]]}; must be 0 and none, or 1 and cpu for both"
    ),
    reason="CPUOffloadPolicy moves weights, gradients and optimizer states together to host memory.",
    source=FULLY_SHARD,
)

OFFLOAD_NEEDS_SHARDING = predicate(
    "offload-needs-sharding",
    lambda c: (c.batch.offload_optimizer == 0) | (c.batch.zero_stage >= 2),
    lambda c, i: (
        f"offload share({c.batch.offload_optimizer[i]:g}) with zero_stage({c.batch.zero_stage[i]}), needs stage 2 or 3"
    ),
    reason="Offload belongs to sharded parameters; every replica would need a whole copy in host memory.",
    source=FULLY_SHARD,
)

FP8_DENSE = input_rule(
    "fp8-dense-only",
    lambda c: c.job.precision != "fp8" or c.model.moe is None,
    lambda c: f"precision fp8 with experts({c.model.moe.experts if c.model.moe else 0})",
    reason="The fp8 conversion replaces linear layers; experts held as one grouped tensor stay in 16 bits.",
    source="torchao.float8 convert_to_float8_training",
    limit="planner",
)

NO_FP4 = input_rule(
    "fp4-not-offered",
    lambda c: c.job.precision != "nvfp4",
    lambda c: f"precision {c.job.precision}",
    reason="The torchao conversion offers no fp4 training for the written modules.",
    source="torchao.float8 and torchao.prototype.mx_formats",
    allowed="precision in bf16, fp16, fp8, fp32",
)

LOSS_IMPLEMENTATION = input_rule(
    "loss-implementation",
    lambda c: c.job.loss in ("auto", "eager"),
    lambda c: f"loss {c.job.loss}",
    reason="The written module computes the eager cross entropy.",
    source="written loss function",
    allowed="loss in auto, eager",
)

KEPT_WEIGHTS_NEED_SHARDS = predicate(
    "stage-2-needs-shards",
    lambda c: (c.batch.zero_stage != 2) | (c.batch.shard_degree > 1),
    lambda c, i: f"zero_stage(2) with shard_degree({c.batch.shard_degree[i]}), must be more than 1",
    reason="On one GPU there is nothing to shard: with weights that stay gathered it is stage 0.",
    source=FULLY_SHARD,
)

RULES: tuple[Rule, ...] = (
    gpu_vendor("PyTorch FSDP2"),
    LOSS_IMPLEMENTATION,
    FP8_DENSE,
    NO_FP4,
    NO_PIPELINE,
    NO_VIRTUAL_STAGES,
    *COMMON,
    STAGES_FILLED,
    schedule_rule({"single": ("none",), "plain": (), "virtual": ()}, "written module"),
    zero_stages((0, 2, 3), "fully_shard replicates (0), keeps gathered weights (2) or frees them (3).", FULLY_SHARD),
    NO_EXPERT_PARALLEL,
    NO_SECONDARY_SHARD,
    HEADS_OVER_TP,
    KV_HEADS_OVER_TP,
    VOCAB_OVER_TP,
    TENSOR_PARALLEL_MODEL,
    SEQUENCE_PARALLEL_NEEDS_TP,
    SEQUENCE_OVER_CP_TP,
    CONTEXT_PARALLEL_SEQUENCE,
    CONTEXT_PARALLEL_ATTENTION,
    SHARD_COVERS_CONTEXT,
    KEPT_WEIGHTS_NEED_SHARDS,
    OFFLOAD_WHOLE,
    OFFLOAD_NEEDS_SHARDING,
    fp8_alignment("torchao.float8 (dimension check of scaled matrix multiplications)"),
)
