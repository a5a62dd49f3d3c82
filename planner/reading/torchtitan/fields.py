"""Fields of torchtitan's configuration, their types and defaults by version, and its stock models and configurations.

From torchtitan/config/configs.py (0.3.0), torchtitan/config/job_config.py (0.1.0 to 0.2.2), the ``config_registry`` of
each model (0.3.0) and the catalogue's names of the same architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["degree", "count", "switch", "word"]
Era = Literal["registry", "toml"]
"""Version 0.3, with Python functions and flags; versions 0.1 and 0.2, with TOML files and flags."""


@dataclass(frozen=True)
class Known:
    """A field that the reader understands."""

    kind: Kind
    default: int | bool | str | None
    words: tuple[str, ...] = ()
    """What a word can be, where torchtitan checks it."""


_BOTH: dict[str, Known] = {
    "parallelism.data_parallel_replicate_degree": Known("degree", 1),
    "parallelism.data_parallel_shard_degree": Known("degree", -1),
    "parallelism.fsdp_reshard_after_forward": Known("word", "default", ("default", "always", "never")),
    "parallelism.tensor_parallel_degree": Known("degree", 1),
    "parallelism.pipeline_parallel_degree": Known("degree", 1),
    "parallelism.pipeline_parallel_schedule": Known("word", "1F1B"),
    "parallelism.pipeline_parallel_schedule_csv": Known("word", ""),
    "parallelism.pipeline_parallel_microbatch_size": Known("count", 1),
    "parallelism.pipeline_parallel_layers_per_stage": Known("count", None),
    "parallelism.pipeline_parallel_first_stage_less_layers": Known("count", 1),
    "parallelism.pipeline_parallel_last_stage_less_layers": Known("count", 1),
    "parallelism.module_fqns_per_model_part": Known("word", None),
    "parallelism.context_parallel_degree": Known("degree", 1),
    "parallelism.context_parallel_load_balancer": Known("word", "headtail"),
    "parallelism.expert_parallel_degree": Known("degree", 1),
    "training.local_batch_size": Known("count", 8),
    "training.global_batch_size": Known("degree", -1),
    "training.seq_len": Known("count", 2048),
    "training.enable_cpu_offload": Known("switch", False),
    "training.dtype": Known("word", "float32", ("float32", "bfloat16")),
    "training.mixed_precision_param": Known("word", "bfloat16", ("float32", "bfloat16")),
    "training.mixed_precision_reduce": Known("word", "float32", ("float32",)),
    "training.max_norm": Known("word", "1.0"),
    "training.steps": Known("count", 10000),
    "training.gc_freq": Known("count", 50),
    "training.gc_debug": Known("switch", False),
    "compile.enable": Known("switch", False),
    "compile.components": Known("word", "model,loss"),
    "compile.backend": Known("word", "inductor"),
}

_REGISTRY: dict[str, Known] = {
    "parallelism.enable_sequence_parallel": Known("switch", True),
    "parallelism.enable_fsdp_symm_mem": Known("switch", False),
    "parallelism.context_parallel_ptrr_mask_key": Known("word", None),
    "parallelism.spmd_backend": Known("word", "spmd_types", ("partial_dtensor", "full_dtensor", "spmd_types")),
    "training.disable_cuda_graphs": Known("switch", False),
    "compile.enable_async_tensor_parallel": Known("switch", False),
}

_TOML: dict[str, Known] = {
    "parallelism.enable_compiled_autograd": Known("switch", False),
    "parallelism.disable_loss_parallel": Known("switch", False),
    "parallelism.enable_async_tensor_parallel": Known("switch", False),
    "parallelism.pipeline_parallel_split_points": Known("word", None),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Known("switch", True),
    "parallelism.context_parallel_rotate_method": Known("word", "allgather", ("allgather", "alltoall")),
    "parallelism.expert_tensor_parallel_degree": Known("degree", 1),
    "parallelism.expert_parallel_comm_backend": Known("word", "standard", ("standard", "deepep", "hybridep")),
    "training.dataset": Known("word", "c4_test"),
    "training.dataset_path": Known("word", None),
    "training.dataloader": Known("word", None),
    "training.seed": Known("word", None),
    "training.deterministic": Known("switch", False),
    "training.debug_moe_force_load_balance": Known("switch", False),
    "training.compile": Known("switch", False),
    "model.name": Known("word", "llama3"),
    "model.flavor": Known("word", "debugmodel"),
    "model.converters": Known("word", ""),
    "model.print_after_conversion": Known("switch", False),
    "model.hf_assets_path": Known("word", None),
    "model.tokenizer_path": Known("word", None),
    "activation_checkpoint.mode": Known("word", "selective", ("selective", "full", "memory_budget", "none")),
    "activation_checkpoint.selective_ac_option": Known("word", "2"),
}

FIELDS: dict[Era, dict[str, Known]] = {"registry": _BOTH | _REGISTRY, "toml": _BOTH | _TOML}
"""Fields of the sections in which nothing else may stand."""

CLOSED_SECTIONS: dict[Era, tuple[str, ...]] = {
    "registry": ("parallelism", "training", "compile"),
    "toml": ("parallelism", "training", "compile", "model"),
}
"""Sections of which every field is known here, so that a name that is not is a mistake."""

RENAMED: dict[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.enable_fp8_linear": "model.converters",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "float8.enable_float8_linear": "model.converters",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Names before 0.1 and what they became."""

FLOAT8_SWITCHES = frozenset({"training.enable_fp8_linear", "float8.enable_float8_linear"})
"""Switches for what is now the word float8 among the converters."""

SAME_MEANING = frozenset(RENAMED) - FLOAT8_SWITCHES - {"experimental.pipeline_parallel_microbatches"}
"""Renamed fields whose value still means the same."""

MODELS: dict[tuple[str, str], str] = {
    ("llama3", "1B"): "llama-3.2-1b",
    ("llama3", "3B"): "llama-3.2-3b",
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    ("kimi_k2_7", "moonlight_16b_a3b"): "moonlight-16b-a3b",
}
"""Catalogue names of stock flavors with the same dimensions; the DeepSeek ones have no prediction block."""

ATTENTION_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope")
"""Endings of flavors of 0.1 and 0.2 that change the attention kernel, not the dimensions."""


@dataclass(frozen=True)
class Stock:
    """A configuration function of 0.3: the flavor it builds, what it sets, and what it recomputes."""

    flavor: str
    recompute: Literal["selective", "full", "none"]
    settings: Mapping[str, int | bool | str]
    fp8: bool = False
    graphs_with_experts: bool = False
    """Its expert dispatch can be captured in CUDA graphs."""


Values = dict[str, int | bool | str]


def _stock(
    flavor: str,
    recompute: Literal["selective", "full", "none"],
    batch: int,
    seq_len: int,
    settings: Values | None = None,
    *,
    fp8: bool = False,
    graphs_with_experts: bool = False,
) -> Stock:
    base: Values = {"training.local_batch_size": batch, "training.seq_len": seq_len}
    return Stock(flavor, recompute, base | (settings or {}), fp8, graphs_with_experts)


_LOSS_ONLY: Values = {"compile.enable": True, "compile.components": "loss"}
_LOOPED: Values = _LOSS_ONLY | {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
_WITHOUT_GRAPHS: Values = _LOOPED | {"training.disable_cuda_graphs": True}
_EXPERTS = "parallelism.expert_parallel_degree"
_TENSOR = "parallelism.tensor_parallel_degree"

STOCK: dict[tuple[str, str], Stock] = {
    ("llama3", "llama3_8b"): _stock("8B", "selective", 1, 8192),
    ("llama3", "llama3_8b_mxfp8"): _stock(
        "8B", "selective", 1, 8192, {"compile.enable": True, "compile.components": "model"}, fp8=True
    ),
    ("llama3", "llama3_70b"): _stock("70B", "full", 8, 8192, {_TENSOR: 8}),
    ("llama3", "llama3_405b"): _stock(
        "405B",
        "full",
        2,
        8192,
        {_TENSOR: 8, "compile.enable": True, "compile.enable_async_tensor_parallel": True},
        fp8=True,
    ),
    ("qwen3", "qwen3_0_6b"): _stock("0.6B", "selective", 4, 4096),
    ("qwen3", "qwen3_1_7b"): _stock("1.7B", "selective", 4, 4096),
    ("qwen3", "qwen3_14b"): _stock("14B", "full", 4, 4096),
    ("qwen3", "qwen3_32b"): _stock("32B", "full", 2, 4096),
    ("qwen3", "qwen3_30b_a3b"): _stock("30B-A3B", "full", 2, 4096),
    ("qwen3", "sft_qwen3_8b_math"): _stock("8B", "selective", 1, 2048),
    ("deepseek_v3", "deepseek_v3_16b"): _stock("16B", "selective", 4, 4096, _WITHOUT_GRAPHS | {_EXPERTS: 8}),
    ("deepseek_v3", "deepseek_v3_16b_hybridep"): _stock(
        "16B", "selective", 4, 4096, _LOOPED | {_EXPERTS: 8}, graphs_with_experts=True
    ),
    ("deepseek_v3", "deepseek_v3_16b_minimal_async_ep"): _stock(
        "16B",
        "selective",
        4,
        4096,
        _LOSS_ONLY | {"parallelism.data_parallel_shard_degree": 1},
        graphs_with_experts=True,
    ),
    ("deepseek_v3", "deepseek_v3_671b"): _stock("671B", "selective", 4, 4096, _WITHOUT_GRAPHS | {_EXPERTS: 2}),
    ("deepseek_v3", "deepseek_v3_671b_float8"): _stock(
        "671B", "selective", 4, 4096, _WITHOUT_GRAPHS | {_EXPERTS: 2}, fp8=True
    ),
    ("gpt_oss", "gpt_oss_20b"): _stock("20b", "full", 1, 8192),
    ("gpt_oss", "gpt_oss_120b"): _stock("120b", "full", 1, 8192),
}
"""Configuration functions of 0.3.0 whose values are known here, by module and name."""
