"""Bytes of every activation that a layer saves for its backward pass, tensor by tensor, per micro-batch on one rank.

With flash attention, RMSNorm, SwiGLU and 16-bit activations the sum is 8h + 4h_q + 4h_kv + 6f bytes a token (all of
it split over tp with sequence parallelism), as in arXiv 2205.05198 without dropout and score matrices."""

from __future__ import annotations

import numpy as np

from planner.backends.base import RecomputeKind, Tensor
from planner.cost.context import Work
from planner.cost.params import LayerKind, layer_matrices
from planner.cost.workspace import BEFORE_HOPPER
from planner.specs.batch import FloatArray

_DROPPED_SCORE_BYTES = 3.0
"""Per score without flash attention and with dropout: mask 1 and dropped copy 2 beside the softmax output (arXiv
2205.05198, section 4.1)."""
_EAGER_NORM_BYTES = 6.0
"""Per element of the input of an eager norm: its fp32 copy 4 and the normalised tensor before its scale 2."""

_SPLIT_LOGIT_BYTES = 2.0
"""Per logit of a split vocabulary that the loss's own figure counts already: the 16-bit logits themselves."""
_LOG_SOFTMAX_BYTES = 4.0
"""Per logit that the cross entropy saves, in fp32."""


def saved_bytes(work: Work, kind: LayerKind) -> dict[Tensor, FloatArray]:
    """Saved tensors of one layer of ``kind``, bytes, arrays of length N."""
    model, size = work.context.model, work.context.activation_bytes
    # Transformer Engine keeps inputs of narrow matrix multiplications narrow; torchao keeps them in 16 bits and casts
    # again (Float8Linear).
    fp8 = work.context.job.narrow_share if work.context.backend.habits.transformer_engine else 1.0
    inputs = min(model.norms_per_layer, 2)
    tensors: dict[Tensor, FloatArray] = {
        "norm_input": size * model.hidden * model.norms_per_layer * work.sp_tokens,
        "norm_output": fp8 * size * model.hidden * inputs * work.input_tokens,
        **_mixer_bytes(work, kind, size, fp8),
        **_mlp_bytes(work, kind, size, fp8),
    }
    if work.context.backend.habits.eager_norms:
        tensors["norm_output"] = tensors["norm_output"] + _EAGER_NORM_BYTES * model.hidden * inputs * work.sp_tokens
    if work.context.backend.habits.dropout:
        # One byte an element behind the attention and behind the MLP.
        tensors["dropout_masks"] = float(inputs) * model.hidden * work.sp_tokens
    overhead = work.context.backend.habits.activation_overhead
    return {name: overhead * value for name, value in tensors.items()}


def _mixer_bytes(work: Work, kind: LayerKind, size: float, fp8: float) -> dict[Tensor, FloatArray]:
    model = work.context.model
    local = work.tokens / work.tp
    if kind[0] in ("mamba", "gdn"):
        return {"mixer_state": size * _mixer_width(work, kind) * local}
    if kind[0] == "none":
        return {}
    if kind[0] == "mla" and model.mla is not None:
        mla = model.mla
        qk, value = model.heads * (mla.qk_nope + mla.qk_rope), model.heads * mla.v_head
        # Latents are saved before and after their norm; the rotary key once.
        latent = size * (2 * mla.q_lora + 2 * mla.kv_lora + mla.qk_rope) * work.tokens
        tensors: dict[Tensor, FloatArray] = {"latent": latent, "qkv": size * (2 * qk + value) * local}
    else:
        q, kv = model.heads * model.head_dim, np.maximum(model.kv_heads / work.tp, 1.0) * model.head_dim
        value = q
        tensors = {"qkv": size * (q / work.tp + 2.0 * kv) * work.tokens}
        if model.qk_norm != "none":
            # Queries and keys before their norm; values have none.
            tensors["qkv"] = tensors["qkv"] + size * (q / work.tp + kv) * work.tokens
    if work.context.backend.habits.eager_copies:
        tensors["qkv"] = 2.0 * tensors["qkv"]
    copies = 1.0 if _sequence_first_attention(work) else 2.0
    tensors["attention_output"] = (copies * fp8 * size * value + 4.0 * model.heads) * local
    if not work.context.job.flash_attention:
        score = work.context.backend.habits.score_bytes + (
            _DROPPED_SCORE_BYTES if work.context.backend.habits.dropout else 0.0
        )
        tensors["attention_scores"] = score * model.heads * work.context.job.seq_len * local
    return tensors


def _sequence_first_attention(work: Work) -> bool:
    """Whether the attention kernel takes Megatron's sequence-first layout.

    FlashAttention does not: its output stays saved in its own layout and, transposed, as the input of the projection.
    Transformer Engine chooses it before Hopper, and after Hopper where kernels must be deterministic."""
    habits, architecture = work.context.backend.habits, work.context.cluster.accelerator.architecture
    if habits.eager_copies:
        return not work.context.job.flash_attention
    if not habits.transformer_engine or habits.attention_backend in ("fused", "unfused"):
        return True
    chosen = architecture in BEFORE_HOPPER or (habits.deterministic and architecture != "hopper")
    return not (habits.attention_backend == "flash" or chosen) or not work.context.job.flash_attention


def _mixer_width(work: Work, kind: LayerKind) -> float:
    """Elements a state-space mixer saves per token: projection, convolution output, gated output."""
    model = work.context.model
    if kind[0] == "mamba" and model.mamba is not None:
        inner = model.mamba.heads * model.mamba.head_dim
        groups = 2 * model.mamba.groups * model.mamba.state
        return (2 * inner + groups + model.mamba.heads) + (inner + groups) + inner
    if model.gdn is not None:
        qk, value = model.gdn.qk_heads * model.gdn.qk_dim, model.gdn.v_heads * model.gdn.v_dim
        return (2 * qk + 2 * value) + (2 * qk + value) + 2 * value
    raise ValueError(f"layer kind {kind} without its dimensions")


def _mlp_bytes(work: Work, kind: LayerKind, size: float, fp8: float) -> dict[Tensor, FloatArray]:
    model = work.context.model
    up = 2.0 if model.gated_mlp else 1.0
    if kind[1] == "dense":
        elements = model.ffn * work.tokens / work.tp
        # Eager blocks also save the activation before its product with the gate.
        before_gate = size * elements if model.gated_mlp and work.context.backend.habits.eager_copies else 0.0
        return {"mlp_up": size * up * elements, "mlp_act": fp8 * size * elements + before_gate}
    if kind[1] == "moe" and model.moe is not None:
        moe = model.moe
        elements = moe.expert_ffn * work.routed_rows / work.etp
        shared = moe.shared_ffn * work.tokens / work.tp
        # Router logits and probabilities in fp32, and the tokens in expert order (the experts' input).
        routing = 8.0 * moe.experts * work.sp_tokens + fp8 * size * (moe.latent or model.hidden) * work.routed_rows
        if not work.context.backend.habits.fused_activation:
            # The activation before its product with the probability is saved as well.
            routing = routing + size * elements
        # Expert tensor parallelism gathers the tokens, then sorts them by expert: both copies stay.
        gathered = np.where(work.etp > 1, size * (moe.latent or model.hidden) * work.routed_rows, 0.0)
        return {
            "expert_up": size * up * elements,
            "expert_act": fp8 * size * elements,
            "shared_experts": size * (up + fp8) * shared,
            "router": routing + gathered,
        }
    return {}


def output_gradient_share(work: Work) -> FloatArray:
    """(N,) gradients of all outputs of matrices and norms over what the same layers save: all that the weight gradients
    need beside the saved tensors."""
    gradients, saved = work.zeros(), work.zeros()
    for kind in work.context.model.layer_kinds():
        gradients = gradients + _output_gradient_bytes(work, kind)
        saved = saved + sum(saved_bytes(work, kind).values(), work.zeros())
    return np.asarray(gradients / saved)


def _output_gradient_bytes(work: Work, kind: LayerKind) -> FloatArray:
    model = work.context.model
    elements = model.norms_per_layer * model.hidden * work.sp_tokens
    for matrix in layer_matrices(model, kind):
        expert = matrix.part == "expert"
        rows = work.routed_rows if expert else work.tokens
        degree = (work.etp if expert else work.tp) if matrix.split == "column" else 1.0
        elements = elements + rows * matrix.outputs / degree
    return work.context.activation_bytes * elements


def final_norm_bytes(work: Work) -> FloatArray:
    """Input and output of the norm in front of the head."""
    size = work.context.activation_bytes * work.context.model.hidden
    return size * (work.sp_tokens + work.input_tokens)


def layer_input_bytes(work: Work) -> FloatArray:
    """What full recomputation keeps of a layer: its input."""
    return work.context.activation_bytes * work.context.model.hidden * work.sp_tokens


def recompute_saved_bytes(work: Work, tensors: dict[Tensor, FloatArray], choice: RecomputeKind) -> FloatArray:
    """Bytes that recomputing one layer does not keep."""
    if choice.mode == "none":
        return work.zeros()
    if choice.mode == "full":
        everything = sum(tensors.values(), work.zeros())
        return np.maximum(everything - layer_input_bytes(work), 0.0)
    stays = dict(choice.kept)
    dropped = (name for name in sorted(choice.drops) if name in tensors)
    return sum(((1.0 - stays.get(name, choice.keeps)) * tensors[name] for name in dropped), work.zeros())


def layer_transient_bytes(work: Work, kind: LayerKind) -> FloatArray:
    """Gradients of activations alive while one layer runs backward."""
    model, size = work.context.model, work.context.activation_bytes
    up = 3.0 if model.gated_mlp else 2.0
    hidden = 2.0 * size * model.hidden * work.tokens
    if work.context.backend.habits.gathered_inputs:
        # The gradient of the gathered input, before it is scattered to the ranks that split the tokens.
        hidden = hidden + np.where(work.batch.sequence_parallel, size * model.hidden * work.tokens, 0.0)
    if kind[1] == "moe" and model.moe is not None:
        routed = work.routed_rows * (
            size * up * model.moe.expert_ffn / work.etp + 2.0 * size * (model.moe.latent or model.hidden)
        )
        return routed + hidden
    return size * up * model.ffn * work.tokens / work.tp + hidden


def waiting_logits_bytes(work: Work, vocab: FloatArray, in_flight: FloatArray, waits: FloatArray) -> FloatArray:
    """Logits that a stage's framework holds until the backward pass of their micro-batch, and the fp32 log-softmax that
    the loss saves of those of other micro-batches ``in_flight`` (N,); the running one's is part of the loss.

    The gradient of other logits is as large where it ``waits`` (N,) for the weight gradient of the head."""
    split = work.tp if work.context.backend.habits.loss_vocab_parallel else 1.0
    size = work.context.activation_bytes
    # A loss in parallel peaks while its 16-bit logits are there, so its figure has them already.
    own = np.where(work.tp > 1, size - _SPLIT_LOGIT_BYTES, size)
    per_logit = own + (size + _LOG_SOFTMAX_BYTES) * (in_flight - 1.0) + size * waits
    return np.asarray(per_logit * work.tokens * vocab / split)


def loss_transient_bytes(work: Work, vocab: FloatArray) -> FloatArray:
    """Logits, softmax and their gradient at the loss, and the gradient of the final hidden state; ``vocab`` (N,)
    padded rows."""
    habits, job = work.context.backend.habits, work.context.job
    split = work.tp if habits.loss_vocab_parallel else 1.0
    shared = np.where(work.tp > 1, habits.tensor_parallel_logit_bytes, 0.0)
    logits = (habits.loss_bytes_per_logit(job) + shared) * work.tokens * vocab / split
    return logits + 2.0 * work.context.activation_bytes * work.context.model.hidden * work.tokens
