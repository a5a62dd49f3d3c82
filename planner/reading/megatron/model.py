"""The architecture that Megatron-LM's arguments describe, with that framework's defaults for what they leave out.

Where the vocabulary comes from a tokenizer, it is taken from the catalogue's model of the same dimensions, or from the
tokenizers whose size is fixed."""

from __future__ import annotations

import ast
from typing import Any, Literal

from pydantic import ValidationError

from planner.catalog import load_model, model_ids
from planner.reading.megatron.flags import Stated
from planner.reading.megatron.fork import is_fork
from planner.specs.finding import Finding
from planner.specs.model import BiasSpec, MlaSpec, ModelSpec, MoeSpec, WindowSpec

_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizers that have one vocabulary only."""
_ELSEWHERE = (
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "experimental-attention-variant",
    "heterogeneous-layers-config-path",
    "spec",
)
"""Arguments that describe layers which this reader does not follow."""
_MAX_LAYERS = 10_000
_ROWS_OF_A_RANK, _USUAL_TP = 128, 8
"""A stated vocabulary may be that of the release, padded to whole blocks of this many rows a tensor-parallel rank (the
file's, or a node's); one that is further off is another vocabulary, and the model another model."""


def model_of(stated: Stated, name: str) -> ModelSpec | None:
    """The model, or None with a finding where something that decides its size is not stated."""
    flag = next((name for name in _ELSEWHERE if name in stated.values), "")
    if flag or stated.described_by:
        stated.note(
            Finding(
                id="model-described-elsewhere",
                severity="warning",
                message=f"{f'--{flag}' if flag else stated.described_by} describes layers that are not read from here",
                where=stated.place(flag or "num-layers"),
                hint="name the model when you ask for an estimate",
            )
        )
        return None
    dimensions = _dimensions(stated)
    if dimensions is None:
        return None
    vocab, named = _vocabulary(stated, dimensions)
    if vocab is None:
        return None
    try:
        model = ModelSpec(name=named or name, vocab=vocab, **dimensions)
    except ValidationError as problem:
        words = problem.errors()[0]["msg"].removeprefix("Value error, ")
        _contradicts(stated, words)
        return None
    if named is not None:
        _compare(stated, model)
    return model


def _contradicts(stated: Stated, message: str) -> None:
    where = stated.place("num-layers", "hidden-size")
    stated.note(Finding(id="model-contradicts-itself", severity="error", message=message, where=where))


_COMPARED = {
    "position": "--position-embedding-type",
    "bias": "--disable-bias-linear, --add-qkv-bias",
    "norm": "--normalization",
    "gated_mlp": "--swiglu",
    "qk_norm": "--qk-layernorm",
}
"""What Megatron-LM's defaults change silently, and the flags that decide it."""


def _compare(stated: Stated, model: ModelSpec) -> None:
    """Says where a model with the dimensions of a released one is built differently."""
    released = load_model(model.name).spec
    differing = [name for name in _COMPARED if getattr(model, name) != getattr(released, name)]
    if differing and stated.complete and not is_fork(stated):
        stated.note(
            Finding(
                id="model-unlike-release",
                severity="warning",
                message=f"the dimensions are those of {model.name}, but not its {', '.join(differing)}: what is not "
                "given has Megatron-LM's default",
                where=stated.place("num-layers"),
                hint="look at " + "; ".join(_COMPARED[name] for name in differing),
            )
        )


def _dimensions(stated: Stated) -> dict[str, Any] | None:
    """Fields of the model except its name and vocabulary."""
    layers, hidden = stated.integer("num-layers"), stated.integer("hidden-size")
    heads = stated.integer("num-attention-heads")
    if layers is None or hidden is None or heads is None:
        return None
    experts, top_k = stated.integer("num-experts"), stated.integer("moe-router-topk", 2)
    if layers > _MAX_LAYERS or (experts is not None and (top_k or 1) > experts):
        _contradicts(stated, f"num-layers({layers}), num-experts({experts}), top-k({top_k}) describe no model")
        return None
    gated, activation = _activation(stated)
    ffn = stated.integer("ffn-hidden-size", _default_ffn(stated, hidden))
    mla = _latent(stated)
    channels = stated.integer("kv-channels", max(hidden // heads, 1))
    kv_heads = _key_value_heads(stated, heads)
    if ffn is None or channels is None or kv_heads is None:
        return None
    moe = _experts(stated, layers, ffn)
    learned, position = _position(stated)
    longest = stated.integer("max-position-embeddings") or stated.integer("seq-length") or 1
    return {
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": mla.qk_nope + mla.qk_rope if mla else channels,
        "max_seq": longest,
        "attention": "mla" if mla else "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa",
        "tied": not stated.switch("untie-embeddings-and-output-weights"),
        "gated_mlp": gated,
        "activation": activation,
        "bias": _bias(stated),
        "norm": "rmsnorm" if stated.text("normalization") == "RMSNorm" else "layernorm",
        "qk_norm": "per_head" if stated.switch("qk-layernorm") and mla is None else "none",
        "position": position,
        "learned_positions": longest if learned else 0,
        "window": _window(stated),
        "mla": mla,
        "moe": moe,
        "mtp_layers": stated.integer("mtp-num-layers", 0, least=0) or 0,
        "attention_gate": bool(stated.switch("attention-output-gate")),
        "sinks": stated.text("softmax-type") == "learnable",
    }


def _activation(stated: Stated) -> tuple[bool, Literal["silu", "gelu", "relu2"]]:
    if stated.switch("swiglu"):
        return True, "silu"
    if stated.switch("quick-geglu"):
        return True, "gelu"
    return False, "relu2" if stated.switch("squared-relu") else "gelu"


def _default_ffn(stated: Stated, hidden: int) -> int:
    """validate_args: four times hidden, with SwiGLU two thirds of it rounded down to a multiple of 64."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if stated.values.get("swiglu") else 4 * hidden


def _key_value_heads(stated: Stated, heads: int) -> int | None:
    grouped = stated.switch("group-query-attention")
    groups = stated.integer("num-query-groups", 1)
    if grouped or (grouped is None and groups is not None and groups > 1):
        return groups
    if "num-query-groups" in stated.values and groups not in (1, heads):
        stated.note(
            Finding(
                id="query-groups-ignored",
                severity="warning",
                message=f"--num-query-groups {groups} has no effect: every head has its own key and value",
                where=stated.place("num-query-groups"),
                hint="add --group-query-attention",
            )
        )
    return heads


def _position(stated: Stated) -> tuple[bool, Literal["rope", "learned", "none", "alibi"]]:
    kind = stated.text("position-embedding-type", "learned_absolute")
    if stated.switch("use-rotary-position-embeddings"):
        kind = "rope"
    if kind in ("rope", "yarn", "mrope") or (kind is None and not stated.complete):
        return False, "rope"
    learned = kind == "learned_absolute"
    return learned, "learned" if learned else "alibi" if kind == "alibi" else "none"


def _bias(stated: Stated) -> BiasSpec:
    if stated.switch("disable-bias-linear") or not stated.complete:
        return BiasSpec(qkv=bool(stated.switch("add-qkv-bias")))
    return BiasSpec(qkv=True, out=True, mlp=True)


def _window(stated: Stated) -> WindowSpec | None:
    text = stated.text("window-size")
    if text is None:
        return None
    size = text.strip("()[] ").partition(",")[0].strip()
    if not size.isdigit() or not int(size):
        stated.bad_value("window-size", text, "two numbers, the tokens before and after: 4096,0")
        return None
    every = stated.text("window-attn-skip-freq")
    return WindowSpec(size=int(size), global_every=int(every) if every and every.isdigit() else 0)


def _latent(stated: Stated) -> MlaSpec | None:
    """Defaults of MLATransformerConfig."""
    if not stated.switch("multi-latent-attention"):
        return None
    return MlaSpec(
        q_lora=stated.integer("q-lora-rank", 0) or 0,
        kv_lora=stated.integer("kv-lora-rank", 32) or 32,
        qk_nope=stated.integer("qk-head-dim", 128) or 128,
        qk_rope=stated.integer("qk-pos-emb-head-dim", 64) or 64,
        v_head=stated.integer("v-head-dim", 128) or 128,
    )


def _experts(stated: Stated, layers: int, ffn: int) -> MoeSpec | None:
    experts = stated.integer("num-experts")
    top_k = stated.integer("moe-router-topk", 2) or 2
    if experts is None or experts < 2 or top_k > experts:
        return None
    placed = _placed(stated, layers)
    if placed is None:
        stated.bad_value(
            "moe-layer-freq",
            stated.text("moe-layer-freq") or "",
            "a number, or a list of 0 and 1 for every layer that begins with 0s and then repeats one distance",
        )
    first, every, offset = placed or (0, 1, 0)
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        expert_ffn=stated.integer("moe-ffn-hidden-size", ffn) or ffn,
        shared_ffn=stated.integer("moe-shared-expert-intermediate-size", 0, least=0) or 0,
        shared_gate=bool(stated.switch("moe-shared-expert-gate")),
        dense_first=first,
        every=every,
        offset=offset,
        latent=stated.integer("moe-latent-size", 0, least=0) or 0,
        expert_bias=bool(stated.switch("moe-router-enable-expert-bias")),
    )


def _placed(stated: Stated, layers: int) -> tuple[int, int, int] | None:
    """Leading dense layers, distance and offset of the mixtures; None where they are not that regular."""
    text = stated.text("moe-layer-freq", "1")
    if text is None:
        return 0, 1, 0
    value = stated.items("moe-layer-freq")
    kinds = list_expression(text if len(value) < 2 else "[" + ",".join(value) + "]", layers)
    if kinds is None or 1 not in kinds:
        return None
    first = kinds.index(1)
    second = next((index for index in range(first + 1, layers) if kinds[index]), layers)
    every = max(second - first, 1)
    wanted = [int(index >= first and (index - first) % every == 0) for index in range(layers)]
    return (first, every, first % every) if wanted == kinds else None


def list_expression(text: str, layers: int) -> list[int] | None:
    """One 0 or 1 a layer from a number (every how many layers) or from ``([0]*3+[1]*58)``; None where it is neither."""
    if text.isdigit() and len(text) < 6:
        return [int(index % int(text) == 0) for index in range(layers)] if int(text) else None
    try:
        value = _list(ast.parse(text.strip(), mode="eval").body) if len(text) < 50_000 else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if value is not None and len(value) == layers else None


def _list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [_bit(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _limited(_list(node.left) + _list(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        counted, repeated = (node.right, node.left) if isinstance(node.right, ast.Constant) else (node.left, node.right)
        if isinstance(counted, ast.Constant) and type(counted.value) is int and 0 <= counted.value <= _MAX_LAYERS:
            part = _list(repeated)
            return part * counted.value if len(part) * counted.value <= _MAX_LAYERS else _limited([0] * 20_000)
    raise ValueError("no list of 0 and 1")


def _bit(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and node.value in (0, 1) and type(node.value) is int:
        return node.value
    raise ValueError("no 0 or 1")


def _limited(value: list[int]) -> list[int]:
    if len(value) > _MAX_LAYERS:
        raise ValueError("longer than any model")
    return value


def _vocabulary(stated: Stated, dimensions: dict[str, Any]) -> tuple[int | None, str | None]:
    """Rows of the embedding, and the name of the catalogue's model of these dimensions where there is one."""
    same = _catalogued(dimensions)
    rows = stated.integer("vocab-size") or stated.integer("padded-vocab-size")
    if rows is not None:
        padding = _ROWS_OF_A_RANK * max(stated.integer("tensor-model-parallel-size", 1) or 1, _USUAL_TP)
        return rows, next((name for name, vocab in same.items() if 0 <= rows - vocab < padding), None)
    where = stated.place("tokenizer-model", "tokenizer-type", "vocab-size")
    tokenizer = " ".join(str(stated.values.get(name, "")) for name in ("tokenizer-type", "tokenizer-model"))
    fixed = _TOKENIZERS.get(tokenizer.split()[0]) if tokenizer.strip() else None
    if fixed is not None:
        return fixed, next((name for name, vocab in same.items() if vocab == fixed), None)
    if len(set(same.values())) > 1:
        same = {name: vocab for name, vocab in same.items() if _letters(name) in _letters(tokenizer)}
    if len(set(same.values())) == 1:
        name, vocab = next(iter(same.items()))
        stated.note(
            Finding(
                id="vocabulary-from-catalogue",
                severity="note",
                message=f"the vocabulary comes from a tokenizer; {vocab} was taken from {name}, which has the same "
                "dimensions",
                where=where,
                hint="add --vocab-size if it is another",
            )
        )
        return vocab, name
    stated.note(
        Finding(
            id="vocabulary-unknown",
            severity="warning",
            message="the size of the vocabulary comes from a tokenizer that cannot be looked into",
            where=where,
            hint="add --vocab-size, or name the model",
        )
    )
    return None, None


def _letters(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def _catalogued(dimensions: dict[str, Any]) -> dict[str, int]:
    """Name and vocabulary of the catalogue's models with the same layers, widths and heads."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "tied")
    specs = (load_model(identifier).spec for identifier in model_ids())
    return {
        spec.name: spec.vocab
        for spec in specs
        if all(getattr(spec, name) == dimensions[name] for name in names) and _same_mlp(spec, dimensions)
    }


def _same_mlp(spec: ModelSpec, dimensions: dict[str, Any]) -> bool:
    experts = dimensions["moe"]
    if experts is None or spec.moe is None:
        return experts is None and spec.moe is None and spec.ffn == dimensions["ffn"]
    return (experts.experts, experts.expert_ffn, experts.shared_ffn) == (
        spec.moe.experts,
        spec.moe.expert_ffn,
        spec.moe.shared_ffn,
    )
