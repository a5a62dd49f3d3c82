"""Builds a model specification from the fields of a text decoder and the conventions of its family.

Only what the configuration or its class states is used; a missing dimension is an error that names the key.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError

from planner.catalog.huggingface.families import Family
from planner.catalog.huggingface.fields import Fields
from planner.catalog.huggingface.moe import read_gdn, read_mamba, read_mla, read_moe, read_pattern
from planner.errors import InputError
from planner.specs.model import BiasSpec, MlaSpec, ModelSpec, WindowSpec

HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_VOCAB = ("padded_vocab_size", "vocab_size")
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_FOUR_TIMES_HIDDEN = frozenset({"gpt2", "gptj", "bloom", "falcon", "mpt"})
"""Types whose MLP is four times the hidden width when no width is given."""
_OPT_POSITION_OFFSET = 2
"""OPT reserves two rows of its position table."""
_DEFAULT_CONTEXT = 4096
_MOST_LAYERS = 10_000

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "relu", "relu2"]] = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "squared_relu": "relu2",
}


def build_spec(fields: Fields, family_id: str, family: Family, name: str, notes: list[str]) -> ModelSpec:
    """The specification of the decoder that ``fields`` describes; remarks for the user are appended to ``notes``."""
    fields = fields.with_defaults(dict(family.defaults))
    try:
        return ModelSpec.model_validate({"name": name, **_values(fields, family_id, family, notes)})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"the dimensions do not fit together: {first['msg'].removeprefix('Value error, ')}",
            where=f"{fields.where}: {field}" if field else fields.where,
            hint="compare the file with the published config.json of the model",
        ) from None


def _values(fields: Fields, family_id: str, family: Family, notes: list[str]) -> dict[str, Any]:
    hidden, heads = fields.required(*HIDDEN), fields.required(*HEADS)
    layers = fields.required(*LAYERS, maximum=_MOST_LAYERS)
    mla, moe = read_mla(fields), read_moe(fields, family, layers)
    pattern = read_pattern(fields, layers)
    context = _context(fields, notes)
    kv_heads = heads if mla else fields.integer(*_KV_HEADS, minimum=1) or heads
    values: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "ffn": _ffn(fields, family_id, hidden),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": _head_dim(fields, hidden, heads, mla),
        "vocab": fields.required(*_VOCAB),
        "max_seq": context,
        "attention": _attention_name(mla, pattern, heads, kv_heads),
        "activation": _activation(fields, family),
        "gated_mlp": family.gated,
        "bias": _bias(fields, family_id, family),
        "mla": mla,
        "moe": moe,
        "gdn": read_gdn(fields) if pattern and "L" in pattern else None,
        "mamba": read_mamba(fields) if pattern and "M" in pattern else None,
        "pattern": pattern,
        "window": None if mla or pattern else _window(fields, family, layers, context, notes),
        "attention_gate": fields.flag("attn_output_gate", family.attention_gate),
        "sinks": family.sinks,
        "head_bias": fields.flag("lm_head_bias", family.head_bias),
        "tied": fields.flag("tie_word_embeddings", family.tied),
        "mtp_layers": fields.integer("num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
        **_norms_and_positions(fields, family_id, family, context),
    }
    if fields.first("embedding_width") is not None:
        values |= {"embedding_width": fields.required("embedding_width"), "embedding_projections": True}
    if values["mtp_layers"]:
        notes.append("multi-token-prediction blocks are trained too but not counted in the parameter total")
    return values


def _context(fields: Fields, notes: list[str]) -> int:
    context = fields.integer(*_CONTEXT, minimum=1)
    if context is None:
        notes.append(f"no context length is given: {_DEFAULT_CONTEXT} assumed")
        return _DEFAULT_CONTEXT
    return context


def _ffn(fields: Fields, family_id: str, hidden: int) -> int:
    if family_id == "llama4_text" and fields.first("intermediate_size_mlp") is not None:
        return fields.required("intermediate_size_mlp")
    ffn = fields.integer(*_FFN)
    if ffn is not None:
        return ffn
    if family_id in _FOUR_TIMES_HIDDEN:
        return 4 * hidden
    experts_only = fields.integer("moe_intermediate_size", minimum=1)
    if experts_only is not None:
        return experts_only
    return fields.required(*_FFN)


def _head_dim(fields: Fields, hidden: int, heads: int, mla: MlaSpec | None) -> int:
    if mla is not None:
        return mla.qk_nope + mla.qk_rope
    width = fields.integer("head_dim", "attention_head_dim", "kv_channels", minimum=1)
    if width is not None:
        return width
    if hidden % heads:
        raise InputError(
            f"hidden_size({hidden}) % num_attention_heads({heads}) = {hidden % heads}, and head_dim is not given",
            where=f"{fields.where}: head_dim",
            hint="add head_dim as the release states it",
        )
    return hidden // heads


def _attention_name(mla: MlaSpec | None, pattern: str | None, heads: int, kv_heads: int) -> str:
    if mla is not None:
        return "mla"
    if pattern is not None:
        return "hybrid"
    if kv_heads == heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def _activation(fields: Fields, family: Family) -> str:
    name = fields.text("hidden_activation", "hidden_act", "mlp_hidden_act", "activation_function")
    if name is None:
        return family.activation
    short = "gelu" if name.lower().startswith(("gelu", "quick_gelu")) else name.lower()
    return _ACTIVATIONS.get(short, family.activation)


def _bias(fields: Fields, family_id: str, family: Family) -> BiasSpec:
    """Biases by the keys that speak of them, the family's otherwise."""
    qkv, out, mlp = family.bias.qkv, family.bias.out, family.bias.mlp
    if fields.first("attention_bias") is not None:
        qkv = fields.flag("attention_bias", qkv)
        out = qkv if family.attention_bias_covers == "all" else out
    for name in ("qkv_bias", "use_qkv_bias", "add_qkv_bias"):
        qkv = fields.flag(name, qkv)
    mlp = fields.flag("mlp_bias", mlp)
    if family_id in ("starcoder2", "falcon", "ernie4_5", "ernie4_5_moe", "internlm2", "internlm"):
        default = family.bias.qkv
        both = fields.flag("use_bias", fields.flag("bias", default))
        qkv, out = both, (family.bias.out if both == default else both)
        mlp = family.bias.mlp if family_id.startswith("intern") else both
    if family_id == "opt":
        qkv = out = mlp = fields.flag("enable_bias", True)
    if family_id == "mpt":
        qkv = out = mlp = not fields.flag("no_bias", False)
    if family_id == "chatglm" and fields.flag("add_bias_linear", False):
        qkv = out = mlp = True
    return BiasSpec(qkv=qkv, out=out, mlp=mlp)


def _norms_and_positions(fields: Fields, family_id: str, family: Family, context: int) -> dict[str, Any]:
    norm, norms, parallel = family.norm, family.norms, family.parallel
    if family_id == "mpt" and fields.flag("no_bias", False):
        norm = "layernorm_nobias"
    if family_id in ("gpt_neox", "stablelm"):
        parallel = fields.flag("use_parallel_residual", family.parallel)
        norms = 1 if parallel and family_id == "stablelm" else norms
    position = "alibi" if fields.flag("alibi", False) else family.position
    if family_id == "baichuan" and fields.required(*HIDDEN) == 5120:  # the 13B release has no rotary embedding
        position = "alibi"
    learned = context if position == "learned" else 0
    if family_id == "mpt" and position == "rope":
        position, learned = "learned", context
    qk_norm = family.qk_norm
    if family.qk_norm_key:
        qk_norm = family.qk_norm if fields.flag(family.qk_norm_key, family_id == "minimax_m2") else "none"
    if fields.flag("qk_layernorm", False):
        raise fields.fail("qk_layernorm", "asks for query/key layer norms, which are not known for this model type")
    return {
        "norm": norm,
        "norms_per_layer": fields.integer("norms_per_layer", minimum=1) or norms,
        "parallel_block": fields.flag("parallel_block", parallel),
        "position": position,
        "learned_positions": learned + (_OPT_POSITION_OFFSET if family_id == "opt" else 0),
        "qk_norm": qk_norm,
        "embedding_norm": family.embedding_norm,
        "final_norm": fields.flag("final_norm", True),
    }


def _window(fields: Fields, family: Family, layers: int, context: int, notes: list[str]) -> WindowSpec | None:
    size = fields.integer("sliding_window", "attention_chunk_size")
    if not size:
        return None
    if not fields.flag("use_sliding_window", not family.window_opt_in):
        notes.append(f"sliding_window {size} is present but switched off: full attention")
        return None
    if size >= context:
        return None
    types = fields.items("layer_types")
    if types:
        return _listed_window(fields, types, size, layers, notes)
    every = fields.integer("sliding_window_pattern", "no_rope_layer_interval", minimum=1) or family.window_every
    if family.window_opt_in:
        full = fields.integer("max_window_layers") or 0
        if full >= layers:
            return None
        if full:
            notes.append(
                f"the first {full} layers attend fully, the rest in a window of {size}: full attention is assumed"
            )
            return None
    return None if every == 1 else WindowSpec(size=size, global_every=every)


def _listed_window(fields: Fields, types: list[Any], size: int, layers: int, notes: list[str]) -> WindowSpec | None:
    """The window rule that gives the listed layer types."""
    if len(types) != layers:
        raise fields.fail("layer_types", f"lists {len(types)} layers, but the model has {layers}")
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if len(full) == layers:
        return None
    every = full[0] + 1 if full else 0
    expected = list(range(every - 1, layers, every)) if every else []
    if every == 1 or expected != full:
        every = max(2, round(layers / len(full)))
        notes.append(f"local and global layers alternate irregularly: every {every}th layer is taken as global")
    return WindowSpec(size=size, global_every=every)
