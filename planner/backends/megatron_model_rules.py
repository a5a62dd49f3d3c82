"""What the arguments of Megatron-LM's pretrain_gpt.py can describe of a model; a model outside of it is refused by
name.

Training something else than what was asked for would be worse than no plan, so nothing is approximated.
"""

from __future__ import annotations

from planner.backends.base import Rule, RuleContext
from planner.backends.rule_kit import input_rule

ARGUMENTS = "megatron/training/arguments.py"
CONFIG = "megatron/core/transformer/transformer_config.py"

ATTENTION_BLOCKS_ONLY = input_rule(
    "attention-blocks-only",
    lambda c: c.model.pattern is None and c.model.mamba is None and c.model.gdn is None,
    lambda c: (
        f"{c.model.name} mixes in blocks that are neither attention nor MLP (pattern {str(c.model.pattern)[:16]}...)"
    ),
    reason=(
        "The arguments written for pretrain_gpt.py describe layers of attention and MLP; hybrids have their own script."
    ),
    source="pretrain_gpt.py (hybrids: pretrain_mamba.py)",
    limit="files",
)

POSITION_ENCODING = input_rule(
    "position-encoding",
    lambda c: c.model.position in ("rope", "learned", "none"),
    lambda c: f"position {c.model.position}",
    reason="--position-embedding-type has no such value.",
    source=ARGUMENTS,
    allowed="position in rope, learned, none",
)

MTP_POSITION = input_rule(
    "mtp-position",
    lambda c: c.model.mtp_layers == 0 or c.model.position != "learned",
    lambda c: f"mtp_layers({c.model.mtp_layers}) with position {c.model.position}",
    reason="Multi-token prediction works with rotary positions or none.",
    source=ARGUMENTS,
    allowed="position in rope, none",
)

PARALLEL_BLOCK = input_rule(
    "parallel-block",
    lambda c: not c.model.parallel_block,
    lambda c: f"{c.model.name} computes attention and MLP from the same input",
    reason="GPTModel puts the MLP after the attention; no argument makes them parallel.",
    source=CONFIG,
)

NORM_PER_LAYER = input_rule(
    "norms-per-layer",
    lambda c: c.model.norms_per_layer == 2 or c.model.parallel_block,
    lambda c: f"norms_per_layer({c.model.norms_per_layer}), must be 2",
    reason="A layer of GPTModel has one norm before the attention and one before the MLP.",
    source="megatron/core/transformer/transformer_layer.py",
)

NORM_KIND = input_rule(
    "norm-kind",
    lambda c: c.model.norm in ("rmsnorm", "layernorm"),
    lambda c: f"norm {c.model.norm}",
    reason="--normalization is LayerNorm with bias, or RMSNorm.",
    source=CONFIG,
    allowed="norm in rmsnorm, layernorm",
)

QUERY_KEY_NORM = input_rule(
    "query-key-norm",
    lambda c: c.model.qk_norm != "full",
    lambda c: f"qk_norm {c.model.qk_norm}",
    reason="--qk-layernorm normalises each head by itself, not the full width.",
    source="megatron/core/transformer/attention.py",
    allowed="qk_norm in none, per_head",
)


def _bias_expressible(context: RuleContext) -> bool:
    bias = context.model.bias
    return (bias.out == bias.mlp and (bias.qkv or not bias.out)) and not context.model.head_bias


def _bias_text(context: RuleContext) -> str:
    bias = context.model.bias
    return f"bias qkv({bias.qkv}) out({bias.out}) mlp({bias.mlp}) head({context.model.head_bias})"


BIAS_LAYOUT = input_rule(
    "bias-layout",
    _bias_expressible,
    _bias_text,
    reason=(
        "Biases come with all matrices, with query/key/value only (--add-qkv-bias), or with none; never with the head."
    ),
    source=f"{ARGUMENTS}; {CONFIG}",
    allowed="bias on all of qkv, out, mlp; on qkv only; on none",
)

EMBEDDING_LAYOUT = input_rule(
    "embedding-layout",
    lambda c: (
        c.model.embedding_width in (0, c.model.hidden)
        and not c.model.embedding_projections
        and not c.model.embedding_norm
    ),
    lambda c: (
        f"embedding_width({c.model.embedding_width}) projections({c.model.embedding_projections}) "
        f"norm({c.model.embedding_norm})"
    ),
    reason="The embedding table has the hidden width and nothing between it and the first layer.",
    source="megatron/core/models/common/embeddings/language_model_embedding.py",
)

ACTIVATION = input_rule(
    "activation",
    lambda c: (c.model.activation == "silu") if c.model.gated_mlp else c.model.activation in ("gelu", "relu2"),
    lambda c: f"activation {c.model.activation} with gated_mlp({c.model.gated_mlp})",
    reason="The MLP is SwiGLU (--swiglu), plain GELU or squared ReLU.",
    source="megatron/training/argument_utils.py",
    allowed="gated silu; plain gelu, relu2",
)

FINAL_NORM = input_rule(
    "final-norm",
    lambda c: c.model.final_norm,
    lambda c: "final_norm(false)",
    reason="The last stage always normalises before the head.",
    source="megatron/core/transformer/transformer_block.py",
)

LOSS_IMPLEMENTATION = input_rule(
    "loss-implementation",
    lambda c: c.job.loss != "chunked",
    lambda c: f"loss {c.job.loss}",
    reason="The vocabulary-parallel cross entropy takes all tokens of a micro-batch at once.",
    source="megatron/core/tensor_parallel/cross_entropy.py",
    allowed="loss in auto, eager, fused",
)

MODEL_RULES: tuple[Rule, ...] = (
    ATTENTION_BLOCKS_ONLY,
    POSITION_ENCODING,
    PARALLEL_BLOCK,
    NORM_PER_LAYER,
    NORM_KIND,
    QUERY_KEY_NORM,
    BIAS_LAYOUT,
    EMBEDDING_LAYOUT,
    ACTIVATION,
    FINAL_NORM,
    MTP_POSITION,
    LOSS_IMPLEMENTATION,
)
