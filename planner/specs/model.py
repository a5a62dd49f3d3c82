"""What a transformer is made of: the dimensions from which parameters, FLOPs and memory are computed.

Holds architecture only; the published counts that the catalogue compares with live in the catalogue entry.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from planner.specs.base import Spec

Mixer = Literal["attention", "window", "mla", "mamba", "gdn", "none"]
"""What mixes tokens in a layer: full attention, sliding-window attention, latent attention, Mamba-2, gated delta
net."""

Mlp = Literal["dense", "moe", "none"]
"""What follows the mixer in a layer."""


class MlaSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank query and key/value projections."""

    q_lora: int = Field(ge=0)
    """Rank of the query down-projection; 0 means a full-rank query projection."""
    kv_lora: int = Field(gt=0)
    """Rank of the compressed key/value."""
    qk_nope: int = Field(gt=0)
    """Per-head query/key width without rotary position."""
    qk_rope: int = Field(gt=0)
    """Per-head query/key width with rotary position (one key shared by all heads)."""
    v_head: int = Field(gt=0)
    """Per-head value width."""


class MoeSpec(Spec):
    """Mixture of experts in place of the dense MLP."""

    experts: int = Field(gt=1)
    """Routed experts of one layer."""
    top_k: int = Field(gt=0)
    """Routed experts that one token visits."""
    expert_ffn: int = Field(gt=0)
    """Width of one routed expert."""
    shared_ffn: int = Field(default=0, ge=0)
    """Total width of the always-active shared experts; 0 means none."""
    dense_first: int = Field(default=0, ge=0)
    """Leading layers that keep the dense MLP."""
    every: int = Field(default=1, gt=0)
    """After the dense ones, every how many layers are MoE."""
    offset: int = Field(default=0, ge=0)
    """Index (modulo ``every``) of the MoE layers."""
    latent: int = Field(default=0, ge=0)
    """Width on which the experts act if smaller than hidden (latent MoE); 0 means hidden."""
    router_bias: bool = False
    """The router has a bias."""
    expert_bias: bool = False
    """One auxiliary-loss-free balancing bias per expert."""
    shared_gate: bool = False
    """A learned gate (hidden weights) scales the shared expert."""

    @model_validator(mode="after")
    def _top_k_within_experts(self) -> MoeSpec:
        if self.top_k > self.experts:
            raise ValueError(f"top_k({self.top_k}) <= experts({self.experts}) must hold")
        return self


class MambaSpec(Spec):
    """Mamba-2 mixer (arXiv 2405.21060)."""

    heads: int = Field(gt=0)
    """Heads of the mixer."""
    head_dim: int = Field(gt=0)
    """Width of one head."""
    groups: int = Field(gt=0)
    """Groups of heads that share B and C."""
    state: int = Field(gt=0)
    """Width of the state of one channel."""
    conv: int = Field(gt=0)
    """Taps of the convolution before the scan."""


class GdnSpec(Spec):
    """Gated delta net mixer (linear attention of Qwen3-Next)."""

    qk_heads: int = Field(gt=0)
    """Query and key heads."""
    v_heads: int = Field(gt=0)
    """Value heads."""
    qk_dim: int = Field(gt=0)
    """Width of one query or key head."""
    v_dim: int = Field(gt=0)
    """Width of one value head."""
    conv: int = Field(gt=0)
    """Taps of the convolution before the mixer."""


class WindowSpec(Spec):
    """Sliding-window (or chunked) attention in some of the layers."""

    size: int = Field(gt=0)
    """Tokens that a local layer looks back."""
    global_every: int = Field(ge=0)
    """Every how many layers one attends globally (6 = five local, one global); 0 means every layer is local."""


class BiasSpec(Spec):
    """Which matrices carry a bias."""

    qkv: bool = False
    """Query, key and value projections."""
    out: bool = False
    """The attention's output projection."""
    mlp: bool = False
    """The matrices of the MLP."""


class ModelSpec(Spec):
    """A decoder-only transformer, dense or mixture-of-experts, possibly hybrid."""

    name: str = Field(min_length=1, max_length=200)
    """What the model is called in answers and files."""
    layers: int = Field(gt=0, le=10_000)
    """Blocks; in a hybrid every mixer and every MLP of ``pattern`` is a block of its own where Mamba is used."""
    hidden: int = Field(gt=0, le=1_000_000)
    """Width of the residual stream."""
    ffn: int = Field(ge=0, le=10_000_000)
    """Width of the dense MLP (unused where every layer is MoE)."""
    heads: int = Field(gt=0)
    """Query heads of an attention layer."""
    kv_heads: int = Field(gt=0)
    """Key and value heads; as many as heads, or a divisor of them."""
    head_dim: int = Field(gt=0)
    """Width of one query head; for latent attention qk_nope + qk_rope."""
    vocab: int = Field(gt=0, le=100_000_000)
    """Rows of the embedding as released."""
    max_seq: int = Field(gt=0)
    """Longest sequence that the release advertises."""
    attention: Literal["mha", "gqa", "mqa", "mla", "hybrid"] = "gqa"
    """How heads share keys and values; mla needs the dimensions under mla."""
    tied: bool = False
    """Input and output embedding share one matrix."""
    gated_mlp: bool = True
    """Three MLP matrices (SwiGLU and friends) rather than two."""
    activation: Literal["silu", "gelu", "relu", "relu2"] = "silu"
    """Function inside the MLP."""
    bias: BiasSpec = BiasSpec()
    """Which matrices carry a bias."""
    norm: Literal["rmsnorm", "layernorm", "layernorm_nobias", "layernorm_np"] = "rmsnorm"
    """Kind of the norms (layernorm_np: without weights)."""
    norms_per_layer: int = Field(default=2, ge=1, le=4)
    """1 for a parallel block, 2 pre-norm, 4 with extra post-norms."""
    qk_norm: Literal["none", "per_head", "full"] = "none"
    """Norms on queries and keys."""
    position: Literal["rope", "learned", "alibi", "none"] = "rope"
    """How positions are told."""
    learned_positions: int = Field(default=0, ge=0)
    """Rows of the table of learned positions."""
    window: WindowSpec | None = None
    """Sliding-window attention; null: every layer sees the whole sequence."""
    mla: MlaSpec | None = None
    """Latent attention; null: none."""
    moe: MoeSpec | None = None
    """Mixture of experts; null: every MLP is dense."""
    mamba: MambaSpec | None = None
    """Mamba-2 blocks of the pattern; null: none."""
    gdn: GdnSpec | None = None
    """Gated delta net blocks of the pattern; null: none."""
    pattern: str | None = None
    """One letter a block: M Mamba-2, L gated delta net, * attention, - dense MLP, E MoE."""
    mtp_layers: int = Field(default=0, ge=0)
    """Multi-token-prediction blocks appended for training."""
    embedding_width: int = Field(default=0, ge=0)
    """Width of the embedding table if it differs from hidden (then projected); 0 means hidden."""
    embedding_projections: bool = False
    """The table is projected to hidden and back (OPT-350M)."""
    embedding_norm: bool = False
    """A norm behind the embedding."""
    head_bias: bool = False
    """The output layer has a bias."""
    attention_gate: bool = False
    """The query projection is doubled by an output gate (Qwen3-Next)."""
    sinks: bool = False
    """One learned attention sink per head (gpt-oss)."""
    parallel_block: bool = False
    """Attention and MLP read the same input (GPT-J, Falcon)."""
    final_norm: bool = True
    """A norm before the output layer."""
    other_params: int = Field(default=0, ge=0)
    """Parameters outside the text decoder that the release counts (vision tower, projector); not trained by the
    plan."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.attention == "mla" and self.mla is None:
            raise ValueError("attention 'mla' needs the mla dimensions")
        if self.heads % self.kv_heads and self.mla is None:
            raise ValueError(
                f"heads({self.heads}) % kv_heads({self.kv_heads}) = {self.heads % self.kv_heads}, must be 0"
            )
        if self.pattern is not None:
            if len(self.pattern) != self.layers:
                raise ValueError(f"pattern has {len(self.pattern)} letters, but layers = {self.layers}")
            unknown = sorted(set(self.pattern) - set("ML*-E"))
            if unknown:
                raise ValueError(f"pattern holds unknown block letters {unknown}; known are M, L, *, -, E")
            for letter, field in (("M", self.mamba), ("L", self.gdn), ("E", self.moe)):
                if letter in self.pattern and field is None:
                    raise ValueError(f"pattern uses {letter!r} but its dimensions are missing")
        if self.ffn == 0 and any(mlp == "dense" for _, mlp in self.layer_kinds()):
            raise ValueError("ffn must be positive: some layers have a dense MLP")
        return self

    def layer_kinds(self) -> tuple[tuple[Mixer, Mlp], ...]:
        """The (mixer, MLP) of every layer in order; equal pairs cost the same."""
        if self.pattern is not None and self.mamba is not None:
            single: dict[str, tuple[Mixer, Mlp]] = {
                "M": ("mamba", "none"),
                "L": ("gdn", "none"),
                "*": ("attention", "none"),
                "-": ("none", "dense"),
                "E": ("none", "moe"),
            }
            return tuple(single[letter] for letter in self.pattern)
        return tuple((self._mixer(index), self._mlp(index)) for index in range(self.layers))

    def prediction_kinds(self) -> tuple[tuple[Mixer, Mlp], ...]:
        """The layers that one multi-token-prediction block repeats: the last one, and in a model of single blocks the
        last attention before it (Nemotron 3: "*E")."""
        kinds = self.layer_kinds()
        if kinds[-1][0] == "none" and ("attention", "none") in kinds:
            return ("attention", "none"), kinds[-1]
        return (kinds[-1],)

    def _mixer(self, index: int) -> Mixer:
        if self.pattern is not None and self.pattern[index] == "L":
            return "gdn"
        if self.mla is not None:
            return "mla"
        if self.window is not None and (self.window.global_every == 0 or (index + 1) % self.window.global_every):
            return "window"
        return "attention"

    def _mlp(self, index: int) -> Mlp:
        moe = self.moe
        if moe is not None and index >= moe.dense_first and (index - moe.offset) % moe.every == 0:
            return "moe"
        return "dense"
