"""How many parameters a model has, layer by layer, and which of them tensor parallelism can split.

Every count is built from the list of weight matrices of a layer, so totals, sharded parts and per-token FLOPs cannot
disagree.  Holds no bytes and no time; formulas follow the published architectures named at each function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from planner.specs.batch import IntArray
from planner.specs.job import LoraTargets
from planner.specs.model import Mixer, Mlp, ModelSpec

LayerKind = tuple[Mixer, Mlp]
Split = Literal["column", "row", "none"]
Part = Literal["attention", "mixer", "mlp", "expert", "shared", "router", "latent"]


@dataclass(frozen=True)
class Matrix:
    """One weight matrix that a token's activation is multiplied with."""

    name: str
    part: Part
    inputs: int
    outputs: int
    split: Split
    """How tensor parallelism cuts it: columns (outputs), rows (inputs), or not at all."""
    bias: bool = False

    @property
    def size(self) -> int:
        """Weights, without the bias."""
        return self.inputs * self.outputs

    @property
    def bias_size(self) -> int:
        return self.outputs if self.bias else 0

    def adapted(self, targets: LoraTargets) -> bool:
        """Whether a low-rank adapter sits beside it in a lora job; routers and latent projections have none."""
        if targets == "qkv":
            return self.part in ("attention", "mixer") and self.name != "out"
        return self.part not in ("router", "latent")


@dataclass(frozen=True)
class LayerParams:
    """Parameters of one layer; ``sharded`` parts are split over tensor-parallel ranks, others held whole by each."""

    attention_sharded: int = 0
    """Query, key, value, output projections (the up-projections for latent attention) and their split biases."""
    attention_replicated: int = 0
    """Down-projections of latent attention, query/key norms, the output bias."""
    mixer_sharded: int = 0
    """Mamba-2 or gated delta net projections, convolution and head parameters."""
    mixer_replicated: int = 0
    mlp_sharded: int = 0
    mlp_replicated: int = 0
    expert_sharded_one: int = 0
    """One routed expert with its biases."""
    experts: int = 0
    """Routed experts; 0 in a layer without them."""
    top_k: int = 0
    """Routed experts that one token visits."""
    shared_expert: int = 0
    """All shared experts of the layer together, with their gate."""
    router: int = 0
    latent: int = 0
    """Projections to and from the width on which latent experts act."""
    norms: int = 0

    @property
    def outside_experts(self) -> int:
        """Everything but the routed experts."""
        mixers = self.attention_sharded + self.attention_replicated + self.mixer_sharded + self.mixer_replicated
        mlps = self.mlp_sharded + self.mlp_replicated + self.shared_expert + self.router + self.latent
        return mixers + mlps + self.norms

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.outside_experts + self.experts * self.expert_sharded_one

    @property
    def active(self) -> int:
        """Parameters that one token touches."""
        return self.outside_experts + self.top_k * self.expert_sharded_one


def head_widths(model: ModelSpec) -> tuple[int, int]:
    """Widths of a query (and key) and of a value of one head."""
    if model.mla is None:
        return model.head_dim, model.head_dim
    return model.mla.qk_nope + model.mla.qk_rope, model.mla.v_head


def padded_vocab(vocab: int, multiple: IntArray) -> IntArray:
    """(N,) rows of the embedding rounded up to ``multiple`` (Megatron: make-vocab-size-divisible-by times tp)."""
    return -(-vocab // multiple) * multiple


def norm_size(model: ModelSpec, width: int) -> int:
    """Parameters of one normalisation over ``width``."""
    return {"rmsnorm": width, "layernorm": 2 * width, "layernorm_nobias": width, "layernorm_np": 0}[model.norm]


def distinct_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    """The different layer kinds in order of first appearance."""
    return tuple(dict.fromkeys(model.layer_kinds()))


def kind_indices(model: ModelSpec) -> tuple[int, ...]:
    """For every layer the index of its kind in ``distinct_kinds``."""
    index = {kind: i for i, kind in enumerate(distinct_kinds(model))}
    return tuple(index[kind] for kind in model.layer_kinds())


def layer_matrices(model: ModelSpec, kind: LayerKind) -> tuple[Matrix, ...]:
    """Weight matrices of one layer in the order of the forward pass; those of ONE routed expert stand for all."""
    mixer, mlp = kind
    matrices = {
        "attention": _attention,
        "window": _attention,
        "mla": _latent_attention,
        "mamba": _mamba,
        "gdn": _gated_delta_net,
        "none": _nothing,
    }[mixer](model)
    return matrices + {"dense": _dense_mlp, "moe": _moe, "none": _nothing}[mlp](model)


@lru_cache(maxsize=512)
def layer_params(model: ModelSpec, kind: LayerKind) -> LayerParams:
    """Parameters of one layer of the given (mixer, MLP) kind."""
    sharded: Counter[str] = Counter()
    replicated: Counter[str] = Counter()
    for matrix in layer_matrices(model, kind):
        (replicated if matrix.split == "none" else sharded)[matrix.part] += matrix.size
        (sharded if matrix.split == "column" else replicated)[matrix.part] += matrix.bias_size
    _add_mixer_vectors(model, kind[0], sharded, replicated)
    whole = sharded + replicated
    moe = model.moe if kind[1] == "moe" else None
    return LayerParams(
        attention_sharded=sharded["attention"],
        attention_replicated=replicated["attention"],
        mixer_sharded=sharded["mixer"],
        mixer_replicated=replicated["mixer"],
        mlp_sharded=sharded["mlp"],
        mlp_replicated=replicated["mlp"],
        expert_sharded_one=whole["expert"],
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        shared_expert=whole["shared"] + (model.hidden if moe and moe.shared_gate else 0),
        router=whole["router"] + (moe.experts if moe and moe.expert_bias else 0),
        latent=whole["latent"],
        norms=model.norms_per_layer * norm_size(model, model.hidden),
    )


def _nothing(model: ModelSpec) -> tuple[Matrix, ...]:
    return ()


def _attention(model: ModelSpec) -> tuple[Matrix, ...]:
    """Grouped-query attention (arXiv 2305.13245): the output gate doubles the query projection."""
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    qkv_bias = model.bias.qkv
    return (
        Matrix("q", "attention", h, q * (2 if model.attention_gate else 1), "column", qkv_bias),
        Matrix("k", "attention", h, kv, "column", qkv_bias),
        Matrix("v", "attention", h, kv, "column", qkv_bias),
        Matrix("out", "attention", q, h, "row", model.bias.out),
    )


def _latent_attention(model: ModelSpec) -> tuple[Matrix, ...]:
    """Multi-head latent attention (arXiv 2405.04434): down-projections are held whole by every tensor-parallel
    rank."""
    mla = model.mla
    if mla is None:
        raise ValueError("a latent-attention layer needs the mla dimensions")
    h, n, qk = model.hidden, model.heads, mla.qk_nope + mla.qk_rope
    query: tuple[Matrix, ...] = (Matrix("q", "attention", h, n * qk, "column"),)
    if mla.q_lora:
        query = (
            Matrix("q_down", "attention", h, mla.q_lora, "none"),
            Matrix("q_up", "attention", mla.q_lora, n * qk, "column"),
        )
    return (
        *query,
        Matrix("kv_down", "attention", h, mla.kv_lora + mla.qk_rope, "none"),
        Matrix("kv_up", "attention", mla.kv_lora, n * (mla.qk_nope + mla.v_head), "column"),
        Matrix("out", "attention", n * mla.v_head, h, "row"),
    )


def _mamba(model: ModelSpec) -> tuple[Matrix, ...]:
    """Mamba-2 (arXiv 2405.21060): one input projection to gate, x, B, C and dt."""
    mamba = model.mamba
    if mamba is None:
        raise ValueError("a Mamba layer needs the mamba dimensions")
    inner, groups = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return (
        Matrix("in", "mixer", model.hidden, 2 * inner + groups + mamba.heads, "column"),
        Matrix("out", "mixer", inner, model.hidden, "row"),
    )


def _gated_delta_net(model: ModelSpec) -> tuple[Matrix, ...]:
    """Gated delta net as in Qwen3-Next: q, k, v, gate z, and two scalars a value head."""
    gdn = model.gdn
    if gdn is None:
        raise ValueError("a gated-delta-net layer needs the gdn dimensions")
    qk, value = gdn.qk_heads * gdn.qk_dim, gdn.v_heads * gdn.v_dim
    return (
        Matrix("in", "mixer", model.hidden, 2 * qk + 2 * value + 2 * gdn.v_heads, "column"),
        Matrix("out", "mixer", value, model.hidden, "row"),
    )


def _mlp(model: ModelSpec, part: Part, width: int, ffn: int) -> tuple[Matrix, ...]:
    bias = model.bias.mlp
    names = ("gate", "up") if model.gated_mlp else ("up",)
    columns = tuple(Matrix(name, part, width, ffn, "column", bias) for name in names)
    return (*columns, Matrix("down", part, ffn, width, "row", bias))


def _dense_mlp(model: ModelSpec) -> tuple[Matrix, ...]:
    return _mlp(model, "mlp", model.hidden, model.ffn)


def _moe(model: ModelSpec) -> tuple[Matrix, ...]:
    moe = model.moe
    if moe is None:
        raise ValueError("a mixture-of-experts layer needs the moe dimensions")
    h = model.hidden
    matrices = [Matrix("router", "router", h, moe.experts, "none", moe.router_bias)]
    if moe.latent:
        matrices.append(Matrix("latent_down", "latent", h, moe.latent, "none"))
    matrices += _mlp(model, "expert", moe.latent or h, moe.expert_ffn)
    if moe.latent:
        matrices.append(Matrix("latent_up", "latent", moe.latent, h, "none"))
    if moe.shared_ffn:
        matrices += _mlp(model, "shared", h, moe.shared_ffn)
    return tuple(matrices)


def _add_mixer_vectors(model: ModelSpec, mixer: Mixer, sharded: Counter[str], replicated: Counter[str]) -> None:
    """Parameters of a mixer that are not matrices: norms inside it, sinks, convolutions, per-head scalars."""
    if mixer in ("attention", "window"):
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        replicated["attention"] += {"none": 0, "per_head": 2 * model.head_dim, "full": q + kv}[model.qk_norm]
        sharded["attention"] += model.heads if model.sinks else 0
    elif mixer == "mla" and model.mla is not None:
        replicated["attention"] += model.mla.q_lora + model.mla.kv_lora
    elif mixer == "mamba" and model.mamba is not None:
        mamba = model.mamba
        inner, groups = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
        sharded["mixer"] += (inner + groups) * (mamba.conv + 1) + 3 * mamba.heads + inner
    elif mixer == "gdn" and model.gdn is not None:
        gdn = model.gdn
        channels = 2 * gdn.qk_heads * gdn.qk_dim + gdn.v_heads * gdn.v_dim
        sharded["mixer"] += channels * gdn.conv + 2 * gdn.v_heads
        replicated["mixer"] += gdn.v_dim


def embedding_params(model: ModelSpec) -> int:
    """The token embedding table, unpadded."""
    return model.vocab * (model.embedding_width or model.hidden)


def head_params(model: ModelSpec) -> int:
    """What the output head adds: its matrix (0 when tied to the embedding) and its bias."""
    return (0 if model.tied else embedding_params(model)) + (model.vocab if model.head_bias else 0)


def other_params(model: ModelSpec) -> int:
    """Learned positions, embedding norm and projections, final norm."""
    norm = norm_size(model, model.hidden)
    projections = 2 * model.embedding_width * model.hidden if model.embedding_projections else 0
    norms = norm * (int(model.embedding_norm) + int(model.final_norm))
    return model.learned_positions * model.hidden + projections + norms


def mtp_params(model: ModelSpec) -> int:
    """Parameters that multi-token-prediction blocks add; embedding and head are shared (arXiv 2412.19437, 2.2)."""
    if not model.mtp_layers:
        return 0
    block = sum(layer_params(model, kind).total for kind in model.prediction_kinds())
    return model.mtp_layers * (block + 2 * model.hidden**2 + 3 * norm_size(model, model.hidden))


def _layers(model: ModelSpec) -> Iterable[tuple[LayerParams, int]]:
    """(parameters, number of layers) of each kind."""
    for kind, number in Counter(model.layer_kinds()).items():
        yield layer_params(model, kind), number


def total_params(model: ModelSpec) -> int:
    """Unique parameters of the text decoder: a tied matrix once, MTP blocks and other towers left out."""
    body = sum(number * layer.total for layer, number in _layers(model))
    return body + embedding_params(model) + head_params(model) + other_params(model)


@dataclass(frozen=True)
class ActiveParams:
    """Parameters that one token touches, in the three conventions under which releases print them."""

    everything: int
    """Embedding and head both counted (once when tied)."""
    no_input_embedding: int
    """Only the output matrix counted (also when tied)."""
    no_embeddings: int
    """Neither counted."""


def active_conventions(model: ModelSpec) -> ActiveParams:
    """The three published conventions of active parameters."""
    body = sum(number * layer.active for layer, number in _layers(model))
    body += other_params(model) + (model.vocab if model.head_bias else 0)
    table = embedding_params(model)
    return ActiveParams(body + table * (1 if model.tied else 2), body + table, body)


def active_params(model: ModelSpec) -> int:
    """Parameters that one token touches, embedding and head included."""
    return active_conventions(model).everything


def matmul_params_per_token(model: ModelSpec) -> int:
    """Weights one token is multiplied with: mixers, MLPs, top-k experts, routers, output head (tied or not).

    Twice this is the matrix FLOPs of a forward pass per token; norms, biases and the embedding lookup are not in it.
    """
    table = embedding_params(model)
    projections = 2 * model.embedding_width * model.hidden if model.embedding_projections else 0
    return sum(n * layer_matmul_params(model, k) for k, n in Counter(model.layer_kinds()).items()) + table + projections


@lru_cache(maxsize=512)
def layer_matmul_params(model: ModelSpec, kind: LayerKind) -> int:
    """The share of one layer in ``matmul_params_per_token``."""
    top_k = model.moe.top_k if model.moe is not None else 0
    gate = model.hidden if kind[1] == "moe" and model.moe is not None and model.moe.shared_gate else 0
    weights = sum(m.size * (top_k if m.part == "expert" else 1) for m in layer_matrices(model, kind))
    return weights + gate
