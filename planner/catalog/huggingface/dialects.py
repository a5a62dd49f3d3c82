"""Translates configurations that use other words into the usual Hugging Face keys.

Covers the nested blocks of MPT and DBRX, the switches of Falcon, ChatGLM and OPT, and the files that Meta and DeepSeek
ship for their own inference code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from planner.catalog.huggingface.fields import Fields


def meta_params(fields: Fields, notes: list[str]) -> Fields:
    """Meta's params.json: the MLP width follows from ffn_dim_multiplier and multiple_of (llama reference code)."""
    hidden, layers = fields.required("dim"), fields.required("n_layers")
    heads = fields.required("n_heads")
    ffn = fields.integer("hidden_dim", minimum=1)
    if ffn is None:
        multiple = fields.integer("multiple_of", minimum=1) or 256
        base = int(fields.number("ffn_dim_multiplier", 1.0) * int(8 * hidden / 3))
        ffn = multiple * math.ceil(base / multiple)
    vocab = fields.data.get("vocab_size")
    if vocab in (None, -1):
        vocab = 32000
        notes.append("vocab_size is not given: 32000 as in the Llama 1 and 2 tokenizer")
    scaled = fields.flag("use_scaled_rope", False)
    small = scaled and (hidden, layers) in ((2048, 16), (3072, 28))
    return Fields(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": fields.integer("n_kv_heads", minimum=1) or heads,
            "head_dim": fields.integer("head_dim", minimum=1),
            "intermediate_size": ffn,
            "vocab_size": vocab,
            "max_position_embeddings": 131072 if scaled else 8192,
            "tie_word_embeddings": small,
        },
        fields.where,
    )


def deepseek_inference(fields: Fields, notes: list[str]) -> Fields:
    """DeepSeek's own inference configuration (dim, n_layers, n_dense_layers ...)."""
    names = {
        "dim": "hidden_size",
        "inter_dim": "intermediate_size",
        "moe_inter_dim": "moe_intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_dense_layers": "first_k_dense_replace",
        "n_heads": "num_attention_heads",
        "n_activated_experts": "num_experts_per_tok",
        "max_seq_len": "max_position_embeddings",
    }
    data = {names.get(name, name): value for name, value in fields.data.items()}
    # Sigmoid scores came with the balancing bias of V3; V2 scores by softmax and has none.
    sigmoid = fields.text("score_func") == "sigmoid"
    data["model_type"] = "deepseek_v3" if sigmoid else "deepseek_v2"
    if data.get("q_lora_rank") == 0:
        data["q_lora_rank"] = None
    notes.append("inference configuration: multi-token prediction is not described there and not counted")
    return Fields(data, fields.where)


def _mpt(fields: Fields) -> dict[str, Any]:
    attention = fields.nested("attn_config")
    data = dict(fields.data)
    heads, hidden = fields.required("n_heads"), fields.required("d_model")
    kv_heads = attention.integer("kv_n_heads", minimum=1) if attention else None
    if attention and attention.text("attn_type") == "multiquery_attention":
        kv_heads = 1
    data["num_key_value_heads"] = kv_heads or heads
    data["intermediate_size"] = round(fields.number("expansion_ratio", 4) * hidden)
    data["alibi"] = attention.flag("alibi", False) if attention else False
    return data


def _dbrx(fields: Fields) -> dict[str, Any]:
    data = dict(fields.data)
    attention, ffn = fields.nested("attn_config"), fields.nested("ffn_config")
    if attention is not None:
        data["num_key_value_heads"] = attention.integer("kv_n_heads", minimum=1)
    if ffn is not None:
        data["intermediate_size"] = ffn.required("ffn_hidden_size")
        data["num_experts"] = ffn.required("moe_num_experts")
        data["num_experts_per_tok"] = ffn.required("moe_top_k")
    return data


def _falcon(fields: Fields) -> dict[str, Any]:
    data = dict(fields.data)
    new, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    heads = fields.required("num_attention_heads", "n_head")
    if new:
        data["num_key_value_heads"] = fields.integer("num_kv_heads", "n_head_kv", minimum=1) or heads
    else:
        data["num_key_value_heads"] = 1 if fields.flag("multi_query", True) else heads
    data.pop("num_kv_heads", None)
    norms_in_parallel = fields.integer("num_ln_in_parallel_attn", minimum=1) or 2
    data["norms_per_layer"] = norms_in_parallel if new else (1 if parallel else 2)
    data["parallel_block"] = parallel or new
    return data


def _chatglm(fields: Fields) -> dict[str, Any]:
    data = dict(fields.data)
    if not fields.flag("multi_query_attention", False):
        data.pop("multi_query_group_num", None)
    return data


def _opt(fields: Fields) -> dict[str, Any]:
    data = dict(fields.data)
    hidden = fields.required("hidden_size")
    width = fields.integer("word_embed_proj_dim", minimum=1) or hidden
    if width != hidden:
        data["embedding_width"] = width
    before = fields.flag("do_layer_norm_before", True)
    data["final_norm"] = before and not fields.flag("_remove_final_layer_norm", False)
    return data


_DIALECTS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "mpt": _mpt,
    "dbrx": _dbrx,
    "falcon": _falcon,
    "chatglm": _chatglm,
    "opt": _opt,
}


def translate(fields: Fields, family: str) -> Fields:
    """The same configuration in the usual keys."""
    dialect = _DIALECTS.get(family)
    return fields if dialect is None else Fields(dialect(fields), fields.where)
