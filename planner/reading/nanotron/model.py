"""``model.model_config`` of a nanotron configuration: which of its model classes is built, and with which dimensions.

The loader tries the classes in turn and, where none fits, keeps the plain mapping and builds a Qwen2 model from it
unchecked (nanotron/config/config.py, ModelArgs); what that hides is found here.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from planner.reading.nanotron.keys import LLAMA, MODEL_DEFAULTS, MOE_DEFAULTS, QWEN2
from planner.reading.nanotron.notes import Notes
from planner.specs.model import BiasSpec, ModelSpec, MoeSpec, WindowSpec
from planner.specs.problems import input_error

PATH = ("model", "model_config")

NOT_MODELLED = ("z_loss_enabled", "no_rope_layer", "flex_attention_mask")
"""Settings that bear on speed or memory where they are set."""


def read_model(notes: Notes, config: Any) -> tuple[ModelSpec | None, bool]:
    """The model, and whether it is of the Qwen2 class; None with findings where it is no model of the planner."""
    if config is None:
        return None, False
    other = _other_class(config) if isinstance(config, dict) else ""
    if other:
        notes.find(
            "model-class",
            "warning",
            f"only the Llama and Qwen2 models are read; this says {other}",
            *PATH,
            other,
            allowed="is_llama_config or is_qwen2_config",
        )
        return None, False
    qwen2 = isinstance(config, dict) and _is_qwen2(config)
    good = notes.section(config, QWEN2 if qwen2 else LLAMA, *PATH)
    if isinstance(config, dict) and not {"is_llama_config", "is_qwen2_config"} & set(config):
        notes.find(
            "model-class-unnamed",
            "warning",
            "the model class is guessed from the keys, and values of a wrong type are then not refused",
            *PATH,
            hint="add is_llama_config: true or is_qwen2_config: true",
        )
    if not isinstance(config, dict):
        return None, False
    notes.unread += [f"model.model_config.{key}" for key in NOT_MODELLED if good.get(key)]
    if qwen2 and good.get("log_attn_probs", True):
        notes.unread.append("model.model_config.log_attn_probs (on by default)")
    if not qwen2 and good.get("attention_bias"):
        notes.find(
            "attention-bias-ignored",
            "warning",
            "the Llama model has no biases, whatever attention_bias says",
            *PATH,
            "attention_bias",
            allowed="false, or a Qwen2 model",
        )
    return _spec(notes, good, qwen2), qwen2


def _other_class(config: dict[Any, Any]) -> str:
    """The key by which a configuration names another class (Starcoder2, or one of the examples'), or nothing."""
    known = ("is_llama_config", "is_qwen2_config")
    names = (key for key in config if isinstance(key, str) and key.startswith("is_") and key.endswith("_config"))
    return next((name for name in names if name not in known), "")


def _is_qwen2(config: dict[Any, Any]) -> bool:
    """The loader takes Llama where all keys belong to it, unless the file names the class."""
    if "is_qwen2_config" in config or "is_llama_config" in config:
        return "is_qwen2_config" in config
    return not set(config) <= set(LLAMA) and set(config) <= set(QWEN2)


def _spec(notes: Notes, good: dict[str, Any], qwen2: bool) -> ModelSpec | None:
    size = {key: good.get(key, default) for key, default in MODEL_DEFAULTS.items()}
    heads, hidden = size["num_attention_heads"], size["hidden_size"]
    if heads < 1 or hidden % heads:
        notes.find(
            "model-config",
            "error",
            f"hidden_size({hidden}) must be a multiple of num_attention_heads({heads})",
            *PATH,
            "num_attention_heads",
        )
        return None
    key_values = good.get("num_key_value_heads") or heads
    window = good.get("sliding_window_size") if qwen2 else None
    try:
        return ModelSpec(
            name="nanotron model",
            layers=size["num_hidden_layers"],
            hidden=hidden,
            ffn=size["intermediate_size"],
            heads=heads,
            kv_heads=key_values,
            head_dim=hidden // heads,
            vocab=size["vocab_size"],
            max_seq=size["max_position_embeddings"],
            attention="mha" if key_values == heads else "gqa",
            tied=good.get("tie_word_embeddings", False),
            activation=good.get("hidden_act", "silu"),
            bias=BiasSpec(qkv=qwen2 and good.get("attention_bias", False)),
            window=WindowSpec(size=window, global_every=0) if window else None,
            moe=_mixture(notes, good.get("moe_config")) if qwen2 else None,
        )
    except ValidationError as error:
        said = input_error(error, "model_config")
        notes.find("model-config", "error", f"{said.where}: {said.message}", *PATH)
        return None


def _mixture(notes: Notes, config: Any) -> MoeSpec | None:
    if config is None:
        return None
    if not isinstance(config, dict):
        notes.find("wrong-type", "error", "moe_config is no section", *PATH, "moe_config")
        return None
    if config.get("layers", [-1]) != [-1]:
        notes.unread.append("model.model_config.moe_config.layers")
    size = {key: config.get(key, default) for key, default in MOE_DEFAULTS.items()}
    return MoeSpec(
        experts=size["num_experts"],
        top_k=size["top_k"],
        expert_ffn=size["moe_intermediate_size"],
        shared_ffn=size["shared_expert_intermediate_size"] if config.get("enable_shared_expert") is True else 0,
    )
