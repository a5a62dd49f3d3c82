"""The architecture as Megatron-LM flags (megatron-core 0.16 and newer).

Only what decides cost and shape is known here; constants of the trained function (rotary base, epsilon, routing scale)
are not part of a plan and are named in the notes instead of being guessed.  Models that the flags cannot describe are
refused by the backend's rules before a plan exists.
"""

from __future__ import annotations

from planner.render.text import Flag, flag
from planner.specs.model import ModelSpec, MoeSpec


def model_flags(model: ModelSpec, seq_len: int) -> list[Flag]:
    """Every flag that describes the architecture."""
    flags = [
        flag("--num-layers", model.layers),
        flag("--hidden-size", model.hidden),
        flag("--ffn-hidden-size", _dense_ffn(model)),
        *_attention(model),
        flag("--seq-length", seq_len),
        flag("--max-position-embeddings", max(seq_len, model.max_seq if model.position == "learned" else seq_len)),
        *_positions(model),
        *_mlp(model),
        *_biases(model),
        flag("--attention-dropout", 0),
        flag("--hidden-dropout", 0),
    ]
    if not model.tied:
        flags.append(flag("--untie-embeddings-and-output-weights"))
    if model.moe is not None:
        flags += _experts(model, model.moe)
    if model.mtp_layers:
        flags.append(flag("--mtp-num-layers", model.mtp_layers))
    return flags


def _dense_ffn(model: ModelSpec) -> int:
    if model.ffn == 0 and model.moe is not None:
        return model.moe.expert_ffn
    return model.ffn


def _attention(model: ModelSpec) -> list[Flag]:
    flags = [flag("--num-attention-heads", model.heads)]
    mla = model.mla
    if mla is not None:
        flags.append(flag("--multi-latent-attention"))
        if mla.q_lora:
            flags.append(flag("--q-lora-rank", mla.q_lora))
        flags += [
            flag("--kv-lora-rank", mla.kv_lora),
            flag("--qk-head-dim", mla.qk_nope),
            flag("--qk-pos-emb-head-dim", mla.qk_rope),
            flag("--v-head-dim", mla.v_head),
            flag("--kv-channels", mla.v_head),
            flag("--qk-layernorm", remark="normalises the latents"),
        ]
        return flags
    if model.kv_heads != model.heads:
        flags += [flag("--group-query-attention"), flag("--num-query-groups", model.kv_heads)]
    flags.append(flag("--kv-channels", model.head_dim))
    if model.qk_norm != "none":
        flags.append(flag("--qk-layernorm"))
    if model.window is not None:
        flags.append(flag("--window-size", f"{model.window.size},0"))
        if model.window.global_every:
            flags.append(flag("--window-attn-skip-freq", model.window.global_every))
    if model.sinks:
        flags.append(flag("--softmax-type", "learnable"))
    if model.attention_gate:
        flags.append(flag("--attention-output-gate"))
    return flags


def _positions(model: ModelSpec) -> list[Flag]:
    if model.position == "learned":
        return [flag("--position-embedding-type", "learned_absolute")]
    if model.position == "rope":
        rope = [flag("--position-embedding-type", "rope")]
        # Latent attention would otherwise default to YaRN scaling.
        if model.mla is None:
            return rope
        return [
            *rope,
            flag("--rope-type", "rope"),
            flag("--no-rope-fusion", remark="latent attention has the fused kernel with YaRN only"),
        ]
    return [flag("--position-embedding-type", "none")]


def _mlp(model: ModelSpec) -> list[Flag]:
    norm = "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"
    flags = [flag("--normalization", norm)]
    if model.gated_mlp:
        flags.append(flag("--swiglu"))
    elif model.activation == "relu2":
        flags.append(flag("--squared-relu"))
    return flags


def _biases(model: ModelSpec) -> list[Flag]:
    if model.bias.out or model.bias.mlp:
        return []
    flags = [flag("--disable-bias-linear")]
    if model.bias.qkv:
        flags.append(flag("--add-qkv-bias"))
    return flags


def _experts(model: ModelSpec, moe: MoeSpec) -> list[Flag]:
    flags = [
        flag("--num-experts", moe.experts),
        flag("--moe-router-topk", moe.top_k),
        flag("--moe-ffn-hidden-size", moe.expert_ffn),
    ]
    if moe.shared_ffn:
        flags.append(flag("--moe-shared-expert-intermediate-size", moe.shared_ffn))
        if moe.shared_gate:
            flags.append(flag("--moe-shared-expert-gate"))
    kinds = [int(mlp == "moe") for _, mlp in model.layer_kinds()]
    if not all(kinds):
        flags.append(flag("--moe-layer-freq", _runs(kinds)))
    if moe.latent:
        flags.append(flag("--moe-latent-size", moe.latent))
    if moe.expert_bias:
        flags += [
            flag("--moe-router-score-function", "sigmoid", remark="the balancing bias needs it"),
            flag("--moe-router-enable-expert-bias"),
            flag("--moe-router-load-balancing-type", "seq_aux_loss"),
        ]
    else:
        flags.append(flag("--moe-router-load-balancing-type", "aux_loss"))
        if moe.top_k == 1:
            # A softmax over one chosen expert is always 1, so Megatron wants it over all experts.
            flags.append(flag("--moe-router-pre-softmax"))
    return [
        *flags,
        flag("--moe-aux-loss-coeff", "1e-3", remark="placeholder"),
        flag("--moe-router-dtype", "fp32"),
        flag("--moe-grouped-gemm"),
    ]


def _runs(bits: list[int]) -> str:
    """``[0, 0, 0, 1, 1]`` as the list expression ``([0]*3+[1]*2)`` that Megatron evaluates; periodic lists are "
    "kept short."""
    for period in range(1, len(bits) // 2 + 1):
        if len(bits) % period == 0 and bits == bits[:period] * (len(bits) // period):
            return f"({_run_lengths(bits[:period])})*{len(bits) // period}"
    return f"({_run_lengths(bits)})"


def _run_lengths(bits: list[int]) -> str:
    parts: list[str] = []
    start = 0
    for index in range(1, len(bits) + 1):
        if index == len(bits) or bits[index] != bits[start]:
            length = index - start
            parts.append(f"[{bits[start]}]*{length}" if length > 1 else f"[{bits[start]}]")
            start = index
    return "+".join(parts)


def model_notes(model: ModelSpec) -> list[str]:
    """What a plan leaves open because it does not change the cost, one sentence each."""
    notes = []
    if model.position == "rope":
        notes.append(
            "The rotary base (`--rotary-base`, Megatron's default 10000) and any rotary scaling are not part of a "
            "plan: take them "
            "from the model's release. They change the trained function, not its cost."
        )
    if model.moe is not None:
        notes.append(
            "Routing details that do not change the cost (score function, group limits, "
            "`--moe-router-topk-scaling-factor`, "
            "auxiliary loss) are placeholders: take them from the model's release."
        )
    return notes
