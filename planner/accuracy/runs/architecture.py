"""The model of a measured run as the cost model wants it: stated dimensions first, the catalogue's for what is
missing."""

from __future__ import annotations

import re

from planner.accuracy.runs.skip import Skip
from planner.catalog import load_model
from planner.errors import InputError
from planner.specs.measurement import MeasuredModel
from planner.specs.model import BiasSpec, GdnSpec, MambaSpec, MlaSpec, ModelSpec, MoeSpec

GPT_VOCAB = 50_257
"""Vocabulary of a GPT model whose source does not state it (GPT-2's, which the open GPT recipes use)."""
_DIMENSIONS = ("layers", "hidden", "heads", "vocab")
_UNSTATED = ("bias", "window", "sinks", "activation")
_PATTERN = re.compile(r"[ME*\-L]{8,}")
_UNMODELLED = ("sparse attention", "csa", "dsa", "hyper-connection")


def model_of(model: MeasuredModel) -> tuple[ModelSpec, list[str]]:
    """The dimensions, and what was filled in."""
    if model.seq_len is None:
        raise Skip("sequence length not stated")
    assumed: list[str] = []
    known = _catalogued(model)
    missing = [name for name in _DIMENSIONS if getattr(model, name) is None]
    if missing and known is not None:
        return _with_sequence(known, model), [f"{', '.join(missing)} from the catalogue"]
    if missing == ["vocab"] and model.gated_mlp is not True and model.name.lower().startswith(("gpt", "megatron")):
        assumed.append(f"vocab {GPT_VOCAB} (GPT-2)")
    elif missing:
        raise Skip("model dimensions not stated")
    if model.hybrid is not None:
        return _hybrid(model, known), assumed
    fields = _plain(model)
    if known is not None and fields["moe"] is not None:
        # No record speaks of biases, windows or sinks.
        fields |= {name: getattr(known, name) for name in _UNSTATED}
    elif known is not None and known.moe is None and known.ffn == fields["ffn"]:
        # The record's dimensions with the details that records do not carry.
        details = (
            "norm",
            "norms_per_layer",
            "bias",
            "position",
            "learned_positions",
            "activation",
            "qk_norm",
            "window",
        )
        fields |= {name: getattr(known, name) for name in details}
    return ModelSpec.model_validate(fields), assumed


def _catalogued(model: MeasuredModel) -> ModelSpec | None:
    """The catalogue's model of that name, if its stated dimensions agree."""
    try:
        spec = load_model(model.name).spec
    except InputError:
        return None
    stated = {"layers": spec.layers, "hidden": spec.hidden, "heads": spec.heads}
    agrees = all(getattr(model, name) in (None, value) for name, value in stated.items())
    return spec if agrees else None


def _with_sequence(spec: ModelSpec, model: MeasuredModel) -> ModelSpec:
    """The catalogue's model trained at the record's sequence length, with the prediction blocks that the run had."""
    changes: dict[str, int] = {"max_seq": max(spec.max_seq, model.seq_len or 0)}
    if model.mtp_layers is not None:
        changes["mtp_layers"] = model.mtp_layers
    return spec.model_copy(update=changes)


def _plain(model: MeasuredModel) -> dict[str, object]:
    """A transformer with one kind of mixer; MoE layers follow the dense ones or alternate with them."""
    layers, hidden, heads = model.layers or 0, model.hidden or 0, model.heads or 0
    gated = model.gated_mlp is not False
    position = model.position if model.position in ("rope", "learned", "alibi", "none") else None
    if position is None:
        position = "rope" if gated else "learned"
    moe = _moe(model, layers)
    mla = model.mla
    ffn = model.ffn or (0 if moe is not None and not moe.dense_first and moe.every == 1 else 4 * hidden)
    head_dim = model.head_dim or max(hidden // heads, 1)
    return {
        "name": model.name or "unnamed",
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn or (moe.expert_ffn if moe else 0),
        "heads": heads,
        "kv_heads": heads if mla else model.kv_heads or heads,
        "head_dim": mla.qk_nope + mla.qk_rope if mla else head_dim,
        "vocab": model.vocab or GPT_VOCAB,
        "max_seq": model.seq_len,
        "attention": "mla" if mla else "gqa",
        "tied": bool(model.tied_embeddings),
        "gated_mlp": gated,
        "activation": "silu" if gated else "gelu",
        "norm": "rmsnorm" if gated else "layernorm",
        "bias": BiasSpec() if gated else BiasSpec(qkv=True, out=True, mlp=True),
        "position": position,
        "learned_positions": (model.seq_len or 0) if position == "learned" else 0,
        "qk_norm": "per_head" if model.qk_norm else "none",
        "moe": moe,
        "mla": None if mla is None else MlaSpec(**{**mla.model_dump(), "q_lora": mla.q_lora or 0}),
        "mtp_layers": model.mtp_layers or 0,
    }


def _moe(model: MeasuredModel, layers: int) -> MoeSpec | None:
    moe = model.moe
    if moe is None:
        return None
    if moe.experts is None or moe.top_k is None or moe.expert_ffn is None:
        raise Skip("model dimensions not stated")
    with_experts = moe.moe_layers or layers
    dense = max(layers - with_experts, 0)
    alternating = dense >= with_experts > 0
    return MoeSpec(
        experts=moe.experts,
        top_k=min(moe.top_k, moe.experts),
        expert_ffn=moe.expert_ffn,
        shared_ffn=moe.shared_ffn or 0,
        dense_first=0 if alternating else dense,
        every=layers // with_experts if alternating else 1,
        offset=layers // with_experts - 1 if alternating else 0,
    )


def _hybrid(model: MeasuredModel, known: ModelSpec | None) -> ModelSpec:
    """A hybrid by name from the catalogue, or by the pattern in its description."""
    text = model.hybrid or ""
    if any(word in text.lower() for word in _UNMODELLED):
        raise Skip("sparse attention or hyper-connections are not modelled")
    if known is not None:
        return _with_sequence(known, model)
    fields = _plain(model)
    layers = model.layers or 0
    if "deltanet" in text.lower():
        # Three linear layers for each attention layer, as Qwen3-Next; dimensions from the catalogue's model.
        gdn = load_model("qwen3-next-80b-a3b").spec.gdn
        fields |= {"gdn": gdn, "attention_gate": True, "attention": "hybrid"}
        fields["pattern"] = "".join("*" if (index + 1) % 4 == 0 else "L" for index in range(layers))
        if not isinstance(gdn, GdnSpec):
            raise Skip("hybrid layers not described")
        return ModelSpec.model_validate(fields)
    pattern = _pattern(text, layers)
    if pattern is None:
        raise Skip("hybrid layers not described")
    moe = fields["moe"]
    if isinstance(moe, MoeSpec):
        latent = _number(text, r"latent(?: size)? (\d+)", 0)
        fields["moe"] = moe.model_copy(update={"latent": latent, "dense_first": 0, "every": 1, "offset": 0})
    # Every block of a pattern is one mixer or one MLP, behind one norm.
    blocks = {"pattern": pattern, "mamba": _mamba(text, model), "attention": "hybrid", "norms_per_layer": 1}
    return ModelSpec.model_validate(fields | blocks | {"position": "none"})


def _pattern(text: str, layers: int) -> str | None:
    """One letter a block; from the text, or spread evenly from the counts of each kind."""
    for found in _PATTERN.findall(text):
        if len(found) == layers:
            return str(found)
    counts = {
        letter: _number(text, rf"(\d+) {word}", 0)
        for letter, word in (("M", "mamba"), ("-", "mlp"), ("*", "attention"))
    }
    if sum(counts.values()) != layers or not counts["M"]:
        return None
    slots = sorted(((index + 0.5) / count, letter) for letter, count in counts.items() for index in range(count))
    return "".join(letter for _, letter in slots)


def _mamba(text: str, model: MeasuredModel) -> MambaSpec:
    """Mamba dimensions from the description; what is missing as Nemotron-H has it: width 2h, head 64, 8 groups."""
    head_dim = _number(text, r"heads \d+ x (\d+)", 64)
    heads = _number(text, r"(?:heads|mamba2) (\d+)", 0) or 2 * (model.hidden or 0) // head_dim
    return MambaSpec(
        heads=heads,
        head_dim=head_dim,
        groups=_number(text, r"groups (\d+)", 8),
        state=_number(text, r"state (\d+)", 128),
        conv=4,
    )


def _number(text: str, pattern: str, default: int) -> int:
    found = re.search(pattern, text, re.IGNORECASE)
    return int(found[1]) if found else default
