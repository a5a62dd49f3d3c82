"""Which configurations cannot be planned, and why: each refusal names the model type and what to give instead.

A wrong model gives a wrong plan, so nothing here is approximated.
"""

from __future__ import annotations

from planner.catalog.huggingface.fields import Fields
from planner.errors import InputError

_ENCODER_DECODER = frozenset(
    {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "led", "whisper", "m2m_100", "blenderbot", "prophetnet"}
)
_ENCODER_ONLY = frozenset(
    {
        "bert",
        "roberta",
        "xlm-roberta",
        "albert",
        "deberta",
        "deberta-v2",
        "electra",
        "distilbert",
        "modernbert",
        "vit",
        "clip",
    }
)
_MIXERS = {
    "jamba": "its Mamba-1 layers",
    "mamba": "its Mamba-1 layers",
    "falcon_mamba": "its Mamba-1 layers",
    "mamba2": "a stack of Mamba-2 blocks without MLP",
    "bamba": "Mamba-2 layers with an MLP in the same block",
    "zamba": "shared attention blocks between Mamba layers",
    "zamba2": "shared attention blocks between Mamba layers",
    "falcon_h1": "attention and Mamba side by side in one block",
    "granitemoehybrid": "Mamba-2 layers with an MLP in the same block",
    "rwkv": "its RWKV time mixing",
    "recurrent_gemma": "its RG-LRU recurrence",
    "minimax": "its lightning attention layers",
    "minimax_text_01": "its lightning attention layers",
    "kimi_linear": "its delta attention layers",
    "mllama": "cross-attention layers between text and vision",
    "deepseek_v32": "its sparse attention indexer",
    "gemma3n": "its per-layer embeddings and alternating updates",
    "deci": "dimensions that differ from layer to layer",
    "nemotron-nas": "dimensions that differ from layer to layer",
    "openelm": "dimensions that differ from layer to layer",
}
_TRAINABLE_STORAGE = frozenset({"fp8", "mxfp4"})
"""Formats in which a release ships but is trained from its bf16 values."""


def refuse_adapter(fields: Fields) -> None:
    """An adapter is no model: its base model must be given."""
    if "peft_type" not in fields and "base_model_name_or_path" not in fields:
        return
    base = fields.text("base_model_name_or_path")
    rank = fields.integer("r")
    targets = fields.data.get("target_modules")
    listed = ", ".join(map(str, targets)) if isinstance(targets, list) else targets
    about = f" (rank {rank}" + (f" on {listed})" if listed else ")") if rank else ""
    raise InputError(
        f"this is an adapter{about}, not a model",
        where=fields.where,
        got=fields.text("peft_type"),
        hint=f"give the base model {base or ''} and plan LoRA with this rank".replace("  ", " "),
    )


def refuse_quantised(fields: Fields) -> str | None:
    """Refuse checkpoints whose integers cannot be trained; returns the storage format of those that can."""
    quantisation = fields.nested("quantization_config") or fields.nested("compression_config")
    if quantisation is None:
        return None
    method = (quantisation.text("quant_method", "quant_algo", "quant_type") or "unknown").lower()
    if method in _TRAINABLE_STORAGE:
        return method
    bits = quantisation.integer("bits", "w_bit")
    width = f", {bits} bits" if bits else ""
    raise InputError(
        f"this checkpoint is quantised ({method}{width}): its weights cannot be trained, nor sharded by FSDP or ZeRO-3",
        where=f"{fields.where}: quantization_config",
        got=method,
        hint="give the unquantised base model",
    )


def refuse_architecture(fields: Fields, model_type: str) -> None:
    """Refuse what is no decoder-only transformer with equal layers."""
    if model_type in _ENCODER_DECODER or fields.flag("is_encoder_decoder", False):
        raise _unsupported(fields, model_type, "it is an encoder-decoder model with two stacks")
    if model_type in _ENCODER_ONLY:
        raise _unsupported(fields, model_type, "it is an encoder, not a decoder-only language model")
    if fields.first("block_configs") is not None:
        raise _unsupported(fields, model_type, f"its dimensions differ from layer to layer ({_nas_counts(fields)})")
    for name in ("num_query_heads", "num_kv_heads", "ffn_multipliers", "hidden_sizes", "intermediate_size"):
        if isinstance(fields.data.get(name), list):
            raise _unsupported(fields, model_type, f"{name} is a list: dimensions differ from layer to layer")
    if model_type in _MIXERS:
        detail = f" ({_jamba_counts(fields)})" if model_type == "jamba" else ""
        raise _unsupported(fields, model_type, f"the cost model does not know {_MIXERS[model_type]}{detail}")


def _unsupported(fields: Fields, model_type: str, reason: str) -> InputError:
    return InputError(
        f"model type {model_type!r} is not supported: {reason}",
        where=fields.where,
        got=model_type,
        allowed="decoder-only transformers, dense or mixture of experts, and the hybrids of the catalogue",
        hint="`planner models` lists what is known; plan with the closest of these",
    )


def _nas_counts(fields: Fields) -> str:
    blocks = [block for block in fields.items("block_configs") or [] if isinstance(block, dict)]

    def active(part: str) -> int:
        parts = [block.get(part) for block in blocks]
        return sum(isinstance(p, dict) and p.get("no_op") is not True for p in parts)

    return f"{len(blocks)} layers, {active('attention')} with attention, {active('ffn')} with an MLP"


def _jamba_counts(fields: Fields) -> str:
    layers = fields.required("num_hidden_layers", maximum=10_000)

    def periodic(kind: str, default_period: int, default_offset: int) -> int:
        period = fields.integer(f"{kind}_layer_period", minimum=1) or default_period
        offset = fields.integer(f"{kind}_layer_offset")
        offset = default_offset if offset is None else offset
        return sum(index % period == offset for index in range(layers))

    return f"{layers} layers, {periodic('attn', 8, 4)} attention, {periodic('expert', 2, 1)} MoE"
