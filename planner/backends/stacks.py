"""Frameworks that published runs used: how each of them ran a step, whether or not plans are written for it.

A stack differs from the backend it derives from only in stated habits and memory layout.  The same classes price a
user's own runs on such a framework.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.backends.base import EVERYTHING, NONE, Backend, BufferContext, RecomputeKind, StateBytes
from planner.backends.deepspeed import EAGER_LOSS_BYTES, MAX_BUCKET, DeepSpeed
from planner.backends.fsdp import FULL, GATHERED_BLOCKS, Fsdp
from planner.backends.megatron import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    Megatron,
    unfused_loss_bytes,
)
from planner.backends.nanotron import Nanotron
from planner.backends.pytorch import PyTorch
from planner.backends.torchtitan import COMPILED_HABITS, EAGER_HABITS, Torchtitan
from planner.specs.batch import FloatArray, IntArray, StrategyBatch
from planner.specs.job import Job
from planner.specs.model import ModelSpec

FRAGMENTED = 1.10
"""Reserved over allocated bytes without expandable segments, which PyTorch has had since 2.1; with them 1.03 to 1.09
was measured (43 runs of MooreThreads/SimuMax)."""


GATHERED_LOGIT_BYTES = 12.0
"""The parts that the ranks gathered, their concatenation, and the whole gradient before it is split again, in fp32;
the out-of-memory boundary of Aleph Alpha's grids asks for 10 to 14."""


def eager_loss_bytes(_job: Job) -> float:
    """Bytes per logit of an eager loss: bf16 logits, fp32 copy, log-softmax and fp32 gradient."""
    return EAGER_LOSS_BYTES


def fused_loss_bytes(_job: Job) -> float:
    """Bytes per logit of a fused loss: bf16 logits and their bf16 gradient."""
    return 4.0


def chunked_loss_bytes(_job: Job) -> float:
    """Bytes per logit of a loss in chunks: one of eight at a time, eagerly."""
    return EAGER_LOSS_BYTES / 8.0


def _states(batch: StrategyBatch, shard: IntArray, weights: float, gradients: float, optimizer: float) -> StateBytes:
    """Whole weights and gradients, optimizer states spread over the shard from stage 1 on."""
    ones = np.ones(len(batch))
    spread = np.where(batch.zero_stage >= 1, shard, 1).astype(np.float64)
    states = optimizer / spread
    return StateBytes(weights * ones, gradients * ones, states, states, states, 0.0 * ones)


def reduced_in_16_bits(_job: Job) -> float:
    """Bytes per parameter of a gradient reduction in the compute format."""
    return 2.0


ACTIVATIONS_TO_HOST = RecomputeKind(
    "cpu_offloading", "selective", ("cpu_offloading",), EVERYTHING, layer_count=True, to_host=True
)
"""Transformer Engine's activation offloading (--cpu-offloading-num-layers): what the first layers of a stage save waits
in host memory; the copies of one layer have the layers up to the next offloaded one to hide behind."""
DOTS_SAVED = RecomputeKind(
    "minimal",
    "selective",
    ("minimal",),
    frozenset({"norm_output", "mlp_act", "expert_act", "attention_scores"}),
    repeats=frozenset({"norms", "activation", "attention_core"}),
)
"""JAX policies that keep every matrix product of a layer (MaxText "minimal", Paxml SAVE_DOT_WITH_NO_BATCH_DIM)."""
QKV_SAVED = RecomputeKind(
    "save_qkv_proj",
    "selective",
    ("save_qkv_proj",),
    frozenset(
        {
            "norm_output",
            "attention_output",
            "attention_scores",
            "mlp_up",
            "mlp_act",
            "expert_up",
            "expert_act",
            "shared_experts",
            "router",
        }
    ),
    repeats=frozenset({"norms", "attention_core", "mlp", "moe"}),
    regathers=True,
)
"""MaxText: of each layer only its input and queries, keys and values are kept."""


class Megatron2021(Megatron):
    """Megatron-LM before Transformer Engine (2020 to 2022): no flash attention, synchronous stage transfers."""

    name = "megatron-2021"
    family = "megatron-2021"
    title = "Megatron-LM before Transformer Engine"
    habits = replace(
        Megatron.habits,
        tensor_parallel_overlap=False,
        attention_kernel="flash2",
        stores_scores=True,
        transformer_engine=False,
        # Its fused weight gradients leave no dummies.
        fused_gradient_accumulation=False,
    )


class MegatronDeepSpeed(Megatron2021):
    """Megatron-DeepSpeed as BLOOM was trained with it."""

    name = "megatron-deepspeed"
    family = "megatron-deepspeed"
    title = "Megatron-DeepSpeed"
    habits = replace(
        Megatron2021.habits,
        fused_kernels=False,
        dropout=True,
        keeps_stage_outputs=True,
        loss_bytes_per_logit=unfused_loss_bytes,
        allocator_factor=FRAGMENTED,
        # BLOOM's runs set CUDA_LAUNCH_BLOCKING=1 against hangs; MT-NLG's take as long between kernels.  A layer has 30
        # kernels forward and 60 backward.
        blocking_launches=True,
        kernels_per_layer=90,
    )

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        """Master weights, fp32 gradients and two moments over the shard (deepspeed/runtime/zero/stage_1_and_2.py); the
        bf16 optimizer accumulates whole fp32 gradients instead (deepspeed/runtime/bf16_optimizer.py)."""
        if job.precision == "bf16":
            return _states(batch, shard, 2.0, 2.0 + 4.0, 12.0)
        return _states(batch, shard, 2.0, 2.0, 16.0)

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        bucket = np.where(context.batch.zero_stage >= 1, 2.0 * MAX_BUCKET, 0.0)
        return {"reduce bucket": bucket, "all-gather bucket": bucket}


class AlephAlpha(Megatron):
    """Aleph Alpha's layout study (arXiv 2311.05610): tensor, pipeline and ZeRO-1, 1F1B."""

    name = "aleph-alpha"
    family = "aleph-alpha"
    title = "Aleph Alpha scaling stack"
    habits = replace(
        Megatron.habits,
        tensor_parallel_overlap=False,
        fused_kernels=False,
        attention_kernel="flash2",
        score_kernel="operators",
        # Every rank computes the loss of the gathered logits.
        loss_vocab_parallel=False,
        # LLaMA's norm as it was published: cast, square, mean, scale, cast back and weight, an operator each.
        norm_bytes=36.0,
        # Gradients are kept in 16 bits: the new one is written (2) and read (2), the old one read and written (4).
        gradient_add_bytes=8.0,
        # Not documented: step times from 32 to 256 GPUs ask for the bandwidth of messages this small.
        bucket_params=1e6,
        loss_bytes_per_logit=eager_loss_bytes,
        tensor_parallel_logit_bytes=GATHERED_LOGIT_BYTES,
        eager_copies=True,
        transformer_engine=False,
        fused_gradient_accumulation=False,
        # Published are only runs that did or did not fit, and the allocator flushes its cache before it gives up.
        allocator_factor=1.01,
    )

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        return _states(batch, shard, 2.0, 2.0, 12.0)


class ZeroBubble(Megatron2021):
    """The Megatron-LM fork of the zero-bubble schedules (arXiv 2401.10241)."""

    name = "zero-bubble"
    family = "zero-bubble"
    title = "Megatron-LM, zero-bubble fork"
    habits = replace(Megatron2021.habits, dropout=True, even_in_flight=True)

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        """Its schedules split the backward pass, which leaves no place to repeat the forward one."""
        return (NONE,)

    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """The first and the last stage hold one layer fewer."""
        if pp * vpp == 1:
            return (model.layers,)
        stages = pp * vpp
        each = -(-(model.layers + 2) // stages)
        middle = (model.layers - 2 * (each - 1)) // (stages - 2) if stages > 2 else 0
        return (each - 1, *([middle] * (stages - 2)), each - 1) if stages > 2 else (each - 1, each - 1)


class MegatronFsdp(Megatron):
    """Megatron-LM with fully sharded parameters (--use-megatron-fsdp), gradients reduced in 16 bits as NVIDIA's recipes
    set it (NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs: grad_reduce_in_fp32 false)."""

    name = "megatron-fsdp"
    family = "megatron-fsdp"
    title = "Megatron-FSDP"
    zero_stages = (0, 3)
    habits = replace(Megatron.habits, data_parallel_overlap="every-layer", gradient_reduce_bytes=reduced_in_16_bits)

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        ones = np.ones(len(batch))
        spread = np.maximum(shard, 1).astype(np.float64)
        optimizer = OPTIMIZER_BYTES[job.precision] / spread
        weights, gradients = WEIGHT_BYTES[job.precision] / spread, GRADIENT_BYTES[job.precision] / spread
        return StateBytes(weights, gradients, optimizer, optimizer, optimizer, 0.0 * ones)

    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """Two blocks are gathered, and the gradients of two wait in 16 bits for their reduction (megatron/core/
        distributed/fsdp, double buffers)."""
        sharded = np.where(context.batch.zero_stage == 3, 1.0, 0.0)
        gathered = sharded * GATHERED_BLOCKS * context.layer_params
        return {
            **super().buffer_bytes(context),
            "gathered blocks": context.job.compute_bytes * gathered,
            "unsharded gradients": 2.0 * gathered,
        }


class LlmFoundry(Fsdp):
    """MosaicML llm-foundry: composer with FSDP1, FlashAttention-2, eager blocks."""

    name = "llm-foundry"
    title = "llm-foundry (FSDP1)"
    # MPT blocks have neither gate nor rotary embedding to save twice, their norms stay in 16 bits, and the loss is
    # flash-attention's fused cross entropy (bf16 logits and gradient).
    habits = replace(Fsdp.habits, activation_overhead=1.0, loss_bytes_per_logit=fused_loss_bytes)


class EagerTorchtitan(Torchtitan):
    """torchtitan 0.1 and 0.2 without torch.compile, as measured: the whole loss at once, ring attention over context
    ranks, checkpoints on as many blocks as the run says."""

    name = "torchtitan-eager"
    title = "torchtitan without compile"
    habits = EAGER_HABITS

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        return Fsdp.recompute_kinds(self, model, job)


class Compiled(EagerTorchtitan):
    """The same with torch.compile."""

    name = "torchtitan-compiled"
    title = "torchtitan, compiled"
    habits = COMPILED_HABITS


class Rowwise(Compiled):
    """The same with float8 scales for every row (torchao recipe rowwise), whose matrix kernels are slower than those
    for one scale a tensor."""

    name = "torchtitan-rowwise"
    title = "torchtitan, compiled, rowwise float8"


class FmsFsdp(Compiled):
    """IBM's fms-fsdp: FSDP with compiled blocks, PyTorch's FlashAttention-2, gradients reduced in bf16
    (fms_fsdp/policies/mixed_precision.py)."""

    name = "fms-fsdp"
    title = "fms-fsdp"
    habits = replace(Compiled.habits, gradient_reduce_bytes=reduced_in_16_bits)


class AutoModel(EagerTorchtitan):
    """NeMo AutoModel: FSDP2 around Transformer Engine's attention, norms and linear layers, not compiled; experts over
    DeepEP."""

    name = "automodel"
    title = "NeMo AutoModel"
    habits = replace(
        Fsdp.habits,
        fused_kernels=True,
        activation_overhead=1.0,
        attention_kernel="vendor",
        expert_dispatch="flex",
        gradient_reduce_bytes=reduced_in_16_bits,
    )


class XlaFsdp(Fsdp):
    """JAX on GPUs (MaxText, Paxml): weights sharded by XLA's partitioner, cuDNN attention, elementwise work fused by
    the compiler, gradients reduced in the format of the matrix multiplications."""

    name = "xla-fsdp"
    title = "JAX FSDP"
    habits = replace(
        Fsdp.habits,
        fused_kernels=True,
        activation_overhead=1.0,
        kernels_per_layer=40,
        attention_kernel="vendor",
        gradient_reduce_bytes=reduced_in_16_bits,
    )

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        return (NONE, DOTS_SAVED, QKV_SAVED, FULL)


class Paxml(XlaFsdp):
    """Paxml: the same partitioner; attention as plain matrix products and a softmax unless a run asks for the fused
    kernel (praxis, layers/attentions.py, DotProductAttention)."""

    name = "paxml"
    title = "Paxml"
    habits = replace(XlaFsdp.habits, stores_scores=True)


class Xtuner(DeepSpeed):
    """xtuner: DeepSpeed ZeRO-3 around Hugging Face blocks whose norms and rotary are fused, FlashAttention-2, Ulysses
    sequence parallelism."""

    name = "xtuner"
    title = "xtuner (DeepSpeed)"
    habits = replace(DeepSpeed.habits, overlapped_stages=(0, 1, 2, 3), fused_kernels=True)

    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        """Activation checkpointing of every block is on in all its configurations."""
        return (FULL,)


class InternEvo(Megatron):
    """InternEvo: Megatron's tensor parallelism without overlap, FlashAttention-2, 16-bit gradients, optimizer states
    sharded over a node."""

    name = "internevo"
    title = "InternEvo"
    habits = replace(
        Megatron.habits,
        tensor_parallel_overlap=False,
        attention_kernel="flash2",
        gradient_reduce_bytes=reduced_in_16_bits,
        loss_bytes_per_logit=eager_loss_bytes,
        eager_copies=True,
        transformer_engine=False,
        fused_gradient_accumulation=False,
    )

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        return _states(batch, shard, 2.0, 2.0, 12.0)


class Primus(Megatron):
    """AMD's Primus: Megatron-LM with Transformer Engine for ROCm; no user buffers."""

    name = "primus"
    title = "Primus (Megatron-LM on ROCm)"
    habits = replace(Megatron.habits, tensor_parallel_overlap=False)


class Traced(Compiled):
    """The same with the whole step traced into one graph: the loss runs in chunks."""

    name = "torchtitan-traced"
    title = "torchtitan, traced"
    # Tracing leaves the kernels as they are.
    habits = replace(Compiled.habits, fused_kernels=False, loss_bytes_per_logit=chunked_loss_bytes)


class Transformers(Fsdp):
    """Hugging Face Trainer with models loaded in bf16: no master weights, and moments in the format of the weights."""

    name = "transformers"
    title = "Hugging Face Trainer"
    habits = replace(Fsdp.habits, tensor_parallel_logit_bytes=0.0)

    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        ones = np.ones(len(batch))
        spread = np.where(batch.zero_stage >= 2, shard, 1).astype(np.float64)
        states = 8.0 / spread
        return StateBytes(2.0 / spread, 2.0 / spread, 4.0 / spread, states, states, 0.0 * ones)


class ZeroOffload(DeepSpeed):
    """ZeRO-3 that is not DeepSpeed's (Gemini): priced like it, but its runs say nothing about DeepSpeed's error."""

    name = "zero3"
    family = "zero3"
    title = "ZeRO-3"


STACKS: dict[str, Backend] = {
    stack.name: stack
    for stack in (
        Megatron(),
        Megatron2021(),
        MegatronDeepSpeed(),
        MegatronFsdp(),
        AlephAlpha(),
        Nanotron(published=True),
        ZeroBubble(),
        LlmFoundry(),
        Torchtitan(),
        EagerTorchtitan(),
        Compiled(),
        Rowwise(),
        FmsFsdp(),
        AutoModel(),
        XlaFsdp(),
        Paxml(),
        Xtuner(),
        InternEvo(),
        Primus(),
        Traced(),
        Transformers(),
        ZeroOffload(),
        Fsdp(),
        PyTorch(),
        DeepSpeed(),
    )
}
"""Every stack by its name; those of the product's own backends are the backends themselves."""

_FRAMEWORKS = (
    ("megatron-fsdp", "megatron-fsdp"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("megatron-lm (sail-sg", "zero-bubble"),
    ("megatron", "megatron"),
    ("nemo", "megatron"),
    ("mcore", "megatron"),
    ("megascale", "megatron"),
    ("meta in-house", "megatron"),
    ("aleph", "aleph-alpha"),
    ("nanotron", "nanotron"),
    ("llm-foundry", "llm-foundry"),
    ("torchtitan", "torchtitan-eager"),
    ("automodel", "automodel"),
    ("pytorch", "pytorch"),
    ("fsdp", "fsdp"),
    ("fms", "fms-fsdp"),
    ("maxtext", "xla-fsdp"),
    ("paxml", "paxml"),
    ("primus", "primus"),
    ("internevo", "internevo"),
    ("internlm", "internevo"),
    ("xtuner", "xtuner"),
    ("transformers", "transformers"),
    ("deepspeed", "deepspeed"),
    ("colossalai", "zero3"),
)
"""How a framework's name starts, and the stack that prices it; the first match counts."""

DEFAULT_STACK = "megatron"
"""What prices a framework that none of the prefixes names."""


def stack_named(framework: str) -> tuple[Backend, bool]:
    """The stack of a framework as a record names it, and whether it is known."""
    name = framework.strip().lower()
    for prefix, stack in _FRAMEWORKS:
        if name.startswith(prefix):
            return STACKS[stack], True
    return STACKS[DEFAULT_STACK], False
