"""Experts, latent attention and block patterns of a configuration: which layers are of which kind, and how wide.

Layer lists that do not follow a rule the model specification can hold are refused, not rounded.
"""

from __future__ import annotations

from planner.catalog.huggingface.families import Family
from planner.catalog.huggingface.fields import Fields
from planner.specs.model import GdnSpec, MambaSpec, MlaSpec, MoeSpec

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_top_k")


def read_mla(fields: Fields) -> MlaSpec | None:
    """Latent attention; a null q_lora_rank means a full query projection."""
    kv_lora = fields.integer("kv_lora_rank", minimum=1)
    if kv_lora is None:
        return None
    return MlaSpec(
        q_lora=fields.integer("q_lora_rank") or 0,
        kv_lora=kv_lora,
        qk_nope=fields.required("qk_nope_head_dim"),
        qk_rope=fields.required("qk_rope_head_dim"),
        v_head=fields.required("v_head_dim"),
    )


def read_moe(fields: Fields, family: Family, layers: int) -> MoeSpec | None:
    """Mixture of experts, or None for a dense model (also one that names a single expert)."""
    experts = fields.integer(*_EXPERTS)
    if experts is None or experts <= 1:
        return None
    width = fields.integer("moe_intermediate_size", "expert_ffn", minimum=1)
    if width is None or family.expert_width_is_ffn:
        width = fields.required("intermediate_size")
    dense_first, every, offset = _placement(fields, layers)
    return MoeSpec(
        experts=experts,
        top_k=fields.required(*_TOP_K),
        expert_ffn=width,
        shared_ffn=_shared_width(fields, family, width),
        dense_first=dense_first,
        every=every,
        offset=offset,
        latent=fields.integer("moe_latent_size") or 0,
        router_bias=family.router_bias,
        expert_bias=_has_balancing_bias(fields, family),
        shared_gate=family.shared_gate and bool(_shared_width(fields, family, width)),
    )


def _has_balancing_bias(fields: Fields, family: Family) -> bool:
    if fields.first("use_routing_bias") is not None:
        return fields.flag("use_routing_bias", True)
    return family.expert_bias or fields.text("topk_method") == "noaux_tc"


def _shared_width(fields: Fields, family: Family, expert_width: int) -> int:
    if family.shared_equals_expert:
        return expert_width
    width = fields.integer("shared_expert_intermediate_size", "shared_intermediate_size")
    if width is not None:
        return width
    number = fields.integer("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0
    return number * (fields.integer("moe_shared_expert_intermediate_size") or expert_width)


def _placement(fields: Fields, layers: int) -> tuple[int, int, int]:
    """(leading dense layers, period, offset) of the MoE layers."""
    listed = _listed_moe_layers(fields, layers)
    if listed is not None:
        return _rule_for(fields, listed, layers)
    dense_first = fields.integer("first_k_dense_replace", "moe_layer_start_index") or 0
    # Qwen counts from 1 ((i + 1) % step == 0), as do Llama 4 and ERNIE; DeepSeek from 0.
    step = fields.integer("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", minimum=1)
    if step is not None:
        return dense_first, step, step - 1
    return dense_first, fields.integer("moe_layer_freq", minimum=1) or 1, 0


def _listed_moe_layers(fields: Fields, layers: int) -> list[int] | None:
    """Indices of the MoE layers where the configuration lists layers one by one."""
    if isinstance(fields.data.get("moe_layer_freq"), list):
        flags = fields.items("moe_layer_freq") or []
        return [index for index, flag in enumerate(flags) if flag]
    explicit = fields.items("moe_layers")
    if explicit:
        return sorted(_index(fields, "moe_layers", item, layers) for item in explicit)
    dense = fields.items("mlp_only_layers")
    if dense:
        without = {_index(fields, "mlp_only_layers", item, layers) for item in dense}
        step = fields.integer("decoder_sparse_step", minimum=1) or 1
        return [index for index in range(layers) if index not in without and (index + 1) % step == 0]
    return None


def _index(fields: Fields, name: str, item: object, layers: int) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < layers:
        raise fields.fail(
            name, "holds something that is no layer index", allowed=f"whole numbers from 0 to {layers - 1}"
        )
    return item


def _rule_for(fields: Fields, moe_layers: list[int], layers: int) -> tuple[int, int, int]:
    """The (dense_first, every, offset) that gives exactly these layers."""
    if not moe_layers:
        return layers, 1, 0
    first = moe_layers[0]
    every = moe_layers[1] - first if len(moe_layers) > 1 else layers
    if every > 0 and moe_layers == list(range(first, layers, every)):
        return (first if every == 1 else 0), every, first % every
    raise fields.fail(
        fields.first("moe_layer_freq", "moe_layers", "mlp_only_layers") or "moe_layers",
        "places the MoE layers irregularly, which the cost model cannot hold",
        allowed="leading dense layers, then every n-th layer MoE",
    )


def read_gdn(fields: Fields) -> GdnSpec | None:
    """Gated delta net layers of Qwen3-Next and its successors."""
    if fields.integer("linear_num_value_heads", minimum=1) is None:
        return None
    return GdnSpec(
        qk_heads=fields.required("linear_num_key_heads"),
        v_heads=fields.required("linear_num_value_heads"),
        qk_dim=fields.required("linear_key_head_dim"),
        v_dim=fields.required("linear_value_head_dim"),
        conv=fields.integer("linear_conv_kernel_dim", minimum=1) or 4,
    )


def read_mamba(fields: Fields) -> MambaSpec | None:
    """Mamba-2 layers of Nemotron-H."""
    if fields.integer("mamba_num_heads", minimum=1) is None:
        return None
    return MambaSpec(
        heads=fields.required("mamba_num_heads"),
        head_dim=fields.required("mamba_head_dim"),
        groups=fields.required("n_groups", "mamba_n_groups"),
        state=fields.required("ssm_state_size", "mamba_state_dim"),
        conv=fields.integer("conv_kernel", "mamba_d_conv", minimum=1) or 4,
    )


def read_pattern(fields: Fields, layers: int) -> str | None:
    """One letter a block, from the override string, the list of layer types, or the interval of full attention."""
    pattern = fields.text("hybrid_override_pattern")
    if pattern is not None:
        return pattern
    types = fields.items("layer_types")
    if types and "linear_attention" in types:
        unknown = sorted({str(kind) for kind in types} - {"linear_attention", "full_attention"})
        if unknown or len(types) != layers:
            raise fields.fail("layer_types", f"does not describe {layers} layers of linear or full attention")
        return "".join("L" if kind == "linear_attention" else "*" for kind in types)
    interval = fields.integer("full_attention_interval", minimum=1)
    if interval is None or fields.integer("linear_num_value_heads", minimum=1) is None:
        return None
    return "".join("*" if (index + 1) % interval == 0 else "L" for index in range(layers))
