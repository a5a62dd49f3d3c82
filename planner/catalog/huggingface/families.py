"""What a model type implies although its config.json does not say it: biases, norms, tying, defaults of absent keys.

Source of every row: the configuration and modelling classes of huggingface/transformers for that model type (or the
release's own code where the hub carries it), as of 2026-08; parameter totals of released checkpoints test most rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.specs.model import BiasSpec

_NONE = BiasSpec()
_ALL = BiasSpec(qkv=True, out=True, mlp=True)
_QKV = BiasSpec(qkv=True)


@dataclass(frozen=True)
class Family:
    """Conventions of one model type; the configuration overrides whatever it states itself."""

    tied: bool = False
    """Embeddings shared when the key tie_word_embeddings is absent."""
    gated: bool = True
    activation: Literal["silu", "gelu", "relu", "relu2"] = "silu"
    norm: Literal["rmsnorm", "layernorm", "layernorm_nobias", "layernorm_np"] = "rmsnorm"
    norms: int = 2
    qk_norm: Literal["none", "per_head", "full"] = "none"
    qk_norm_key: str = ""
    """The flag that switches the query/key norm on; empty: always as ``qk_norm`` says."""
    position: Literal["rope", "learned", "alibi", "none"] = "rope"
    bias: BiasSpec = _NONE
    """Biases when no key speaks of them."""
    attention_bias_covers: Literal["all", "qkv"] = "all"
    """Whether the key attention_bias includes the output projection."""
    head_bias: bool = False
    parallel: bool = False
    sinks: bool = False
    attention_gate: bool = False
    embedding_norm: bool = False
    expert_width_is_ffn: bool = False
    """Experts have the width intermediate_size."""
    shared_gate: bool = False
    shared_equals_expert: bool = False
    """One shared expert of the routed width exists without a key (Llama 4)."""
    router_bias: bool = False
    expert_bias: bool = False
    window_every: int = 0
    """Every how many layers one is global when a window is in use; 0: none is."""
    window_opt_in: bool = False
    """The window counts only with use_sliding_window: true."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Class defaults of keys that may be absent."""


_LLAMA = Family()
_QWEN2 = Family(bias=_QKV, window_opt_in=True, defaults={"use_sliding_window": False})
_QWEN3 = Family(qk_norm="per_head", window_opt_in=True, defaults={"head_dim": 128})
_DEEPSEEK = Family()
_GPT = Family(gated=False, activation="gelu", norm="layernorm", bias=_ALL)
_GEMMA = Family(tied=True, activation="gelu", defaults={"head_dim": 256})
_GEMMA2 = replace(_GEMMA, norms=4, window_every=2, defaults={"head_dim": 256, "sliding_window": 4096})
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm="per_head",
    window_every=6,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
_GLM = Family(attention_bias_covers="qkv", defaults={"head_dim": 128})
_QWEN3_NEXT = replace(
    _QWEN3, attention_gate=True, shared_gate=True, defaults={"head_dim": 256, "full_attention_interval": 4}
)
_COHERE = Family(tied=True, norm="layernorm_nobias", norms=1, parallel=True, qk_norm="full", qk_norm_key="use_qk_norm")
_FALCON = Family(tied=True, gated=False, activation="gelu", norm="layernorm")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "yi": _LLAMA,
    "internlm2": _LLAMA,
    "baichuan": _LLAMA,
    "aquila": _LLAMA,
    "granite": _LLAMA,
    "smollm3": replace(_LLAMA, tied=True),
    "granitemoe": replace(_LLAMA, expert_width_is_ffn=True),
    "internlm": replace(_LLAMA, bias=BiasSpec(qkv=True, out=True)),
    "mistral": replace(_LLAMA, defaults={"num_key_value_heads": 8}),
    "mixtral": replace(_LLAMA, expert_width_is_ffn=True, defaults={"num_key_value_heads": 8}),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": replace(_QWEN2, shared_gate=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_omni_moe_text": _QWEN3,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi": replace(_GPT, norms=1, parallel=True, head_bias=True),
    "phi3": Family(),
    "phimoe": Family(norm="layernorm", expert_width_is_ffn=True),
    "gpt2": replace(_GPT, tied=True, position="learned"),
    "gpt_neox": replace(_GPT, parallel=True),
    "gptj": replace(_GPT, norms=1, parallel=True, head_bias=True, bias=BiasSpec(mlp=True)),
    "opt": replace(_GPT, tied=True, position="learned", activation="relu"),
    "bloom": replace(_GPT, tied=True, position="alibi", embedding_norm=True),
    "falcon": _FALCON,
    "mpt": Family(tied=True, gated=False, activation="gelu", norm="layernorm"),
    "dbrx": Family(norm="layernorm_nobias", expert_width_is_ffn=True),
    "deepseek": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(_DEEPSEEK, expert_bias=True),
    "kimi_k2": replace(_DEEPSEEK, expert_bias=True),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": replace(_GLM, expert_bias=True, qk_norm="per_head", qk_norm_key="use_qk_norm"),
    "chatglm": Family(bias=_QKV),
    "gpt_oss": Family(
        bias=_ALL, sinks=True, router_bias=True, expert_width_is_ffn=True, window_every=2, defaults={"head_dim": 64}
    ),
    "llama4_text": Family(expert_width_is_ffn=True, shared_equals_expert=True, window_every=4),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, window_every=4),
    "starcoder2": replace(_GPT, tied=True),
    "olmo": Family(norm="layernorm_np"),
    "olmo2": Family(qk_norm="full"),
    "olmo3": Family(qk_norm="full", window_every=4),
    "olmoe": Family(qk_norm="full", expert_width_is_ffn=True),
    "nemotron": Family(gated=False, activation="relu2", norm="layernorm"),
    "nemotron_h": Family(gated=False, activation="relu2", norms=1, position="none", expert_bias=True),
    "minimax_m2": Family(qk_norm="full", qk_norm_key="use_qk_norm", expert_width_is_ffn=True, expert_bias=True),
    "ernie4_5": Family(tied=True),
    "ernie4_5_moe": Family(tied=True, expert_bias=True),
    "stablelm": Family(norm="layernorm"),
}

_ARCHITECTURES = {
    "llama": "llama",
    "yi": "llama",
    "mistral": "mistral",
    "internlm2": "internlm2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gpt2lmhead": "gpt2",
    "gptneox": "gpt_neox",
    "deepseekv3": "deepseek_v3",
    "deepseekv2": "deepseek_v2",
}

_SAME_AS = {"gemma2_text": "gemma2", "rw": "falcon", "refinedweb": "falcon", "refinedwebmodel": "falcon"}


def family_name(model_type: str | None, architectures: list[Any]) -> str | None:
    """The key of ``FAMILIES`` for a configuration, by model_type first, by architecture class otherwise."""
    if model_type:
        name = model_type.lower()
        return _SAME_AS.get(name, name)
    for architecture in architectures:
        stem = str(architecture).lower().removesuffix("forcausallm").removesuffix("model")
        if stem in _ARCHITECTURES:
            return _ARCHITECTURES[stem]
        if stem in FAMILIES:
            return stem
    return None
