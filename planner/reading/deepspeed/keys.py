"""What DeepSpeed 0.19 knows by name: every key of ds_config.json, its type, and what became of the keys that are gone.

Data only, from deepspeed/runtime/config.py, runtime/constants.py, runtime/zero/config.py, zero/offload_config.py,
runtime/precision_config.py, runtime/tensor_parallel/config.py and module_inject/auto_ep_config.py at 0.19.8.  Pydantic
checks the sections of the lower half (unknown keys refused, ``"5"`` taken for 5); nobody checks the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Type = Literal["integer", "number", "boolean", "text", "section", "list", "any"]


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    type: Type
    default: object = None
    """What DeepSpeed takes where the key is absent."""
    bears: bool = False
    """The value bears on speed or memory and has no field in a plan."""
    least: int = 0
    """The smallest whole number that is taken."""


def _keys(type: Type, *names: str, default: object = None, bears: bool = False) -> dict[str, Key]:  # noqa: A002
    return {name: Key(type, default, bears) for name in names}


TOP: Mapping[str, Key] = {
    **_keys("integer", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    **_keys("integer", "steps_per_print", "vocabulary_size", "sequence_parallel_size", "data_parallel_size"),
    **_keys("boolean", "managed_gradient_accumulation", default=True, bears=True),
    **_keys("boolean", "dump_state", "disable_python_gc", "disable_allgather", "dataloader_drop_last"),
    **_keys("boolean", "prescale_gradients", default=False),
    **_keys("boolean", "wall_clock_breakdown", "memory_breakdown", default=False, bears=True),
    **_keys("boolean", "zero_allow_untested_optimizer", default=False),
    **_keys("boolean", "zero_force_ds_cpu_optimizer", default=True, bears=True),
    **_keys("boolean", "use_data_before_expert_parallelism", default=False),
    **_keys("text", "communication_data_type", "gradient_allreduce_op", "log_level"),
    **_keys("text", "seq_parallel_communication_data_type", bears=True),
    **_keys("number", "gradient_predivide_factor", "gradient_clipping"),
    **_keys("integer", "allgather_size"),
    **_keys("section", "zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "data_types"),
    **_keys("section", "tensor_parallel", "expert_parallel", "pipeline", "activation_checkpointing"),
    **_keys("section", "torch_autocast", "compile", "hybrid_engine", "weight_quantization", bears=True),
    **_keys("section", "data_efficiency", "flops_profiler", "aio", bears=True),
    **_keys("section", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "timers"),
    **_keys("section", "checkpoint", "datastates_ckpt"),
}
"""The top level, where an unknown key is ignored without a word."""

REMOVED: Mapping[str, str] = {
    "amp": "write fp16, bf16 or torch_autocast instead",
    "compression_training": "remove it; the library for compressed training is gone",
    "curriculum_learning": "write data_efficiency.data_sampling.curriculum_learning instead",
    "eigenvalue": "remove it",
    "elasticity": "write the batch sizes themselves",
    "graph_harvesting": "remove it",
    "nebula": "remove it; checkpoints are written by torch.save",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "sparse_gradients": "remove it",
}
"""Top-level keys that raise DeepSpeedConfigError (runtime/config.py), and what to do."""

REMOVED_ZERO: Mapping[str, str] = {
    "mics_shard_size": "remove it; zero_hpz_partition_size keeps a second copy of the parameters inside a node",
    "mics_hierarchical_params_gather": "remove it",
    "zeropp_loco_param": "remove it; zero_quantized_gradients works without it",
}

ZERO: Mapping[str, Key] = {
    **_keys("integer", "stage", default=0),
    **_keys("boolean", "overlap_comm"),
    **_keys("boolean", "contiguous_gradients", "reduce_scatter", "allgather_partitions", default=True, bears=True),
    **_keys("boolean", "use_multi_rank_bucket_allreduce", default=True, bears=True),
    "reduce_bucket_size": Key("integer", 500_000_000, least=1),
    "allgather_bucket_size": Key("integer", 500_000_000, bears=True),
    **_keys("integer", "sub_group_size", default=1_000_000_000, bears=True),
    **_keys("integer", "stage3_prefetch_bucket_size", default=50_000_000, bears=True),
    **_keys("integer", "stage3_param_persistence_threshold", default=100_000, bears=True),
    **_keys("integer", "stage3_model_persistence_threshold", bears=True),
    **_keys("integer", "stage3_max_live_parameters", default=1_000_000_000),
    **_keys("integer", "stage3_max_reuse_distance", default=1_000_000_000, bears=True),
    **_keys("integer", "stage3_module_granularity_threshold", default=0, bears=True),
    **_keys("boolean", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", default=False),
    **_keys("boolean", "stage3_gather_16bit_weights_on_model_save", default=False),
    **_keys("boolean", "stage3_gather_fp16_weights_on_model_save", default=False),
    **_keys("boolean", "compute_grad_norm", default=True),
    **_keys("boolean", "load_from_fp32_weights", "elastic_checkpoint", "ignore_unused_parameters", "legacy_stage1"),
    **_keys("boolean", "round_robin_gradients", "parameter_alignment", default=False, bears=True),
    **_keys("integer", "zero_hpz_partition_size", default=1),
    **_keys("boolean", "zero_quantized_weights", "zero_quantized_gradients", default=False, bears=True),
    **_keys("boolean", "zero_quantized_nontrainable_weights", default=False, bears=True),
    **_keys("boolean", "memory_efficient_linear", default=True, bears=True),
    **_keys("boolean", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings"),
    **_keys("boolean", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", default=False, bears=True),
    **_keys("boolean", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
    **_keys("section", "offload_param", "offload_optimizer", "leaf_module"),
    **_keys("section", "zenflow", bears=True),
}

NULL_TAKEN = ("bf16", "aio", "datastates_ckpt")
"""Sections at the top level that may be null; DeepSpeed stops with a TypeError or AttributeError at any other."""

STAGE3_ALIASES = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Names that DeepSpeed takes without their ``stage3_``, too (pydantic ``populate_by_name``)."""

OFFLOAD_OPTIMIZER: Mapping[str, Key] = {
    **_keys("text", "device", default="none"),
    **_keys("text", "nvme_path"),
    **_keys("integer", "buffer_count", default=4, bears=True),
    **_keys("boolean", "pin_memory", default=True, bears=True),
    **_keys("boolean", "pipeline_read", "pipeline_write", "fast_init", default=False, bears=True),
    **_keys("number", "ratio", default=1.0),
    **_keys("boolean", "super_offload", default=False, bears=True),
    **_keys("number", "cpuadam_cores_perc", default=0.8, bears=True),
}

OFFLOAD_PARAM: Mapping[str, Key] = {
    **_keys("text", "device", default="none"),
    **_keys("text", "nvme_path"),
    **_keys("integer", "buffer_count", default=5, bears=True),
    **_keys("integer", "buffer_size", default=100_000_000, bears=True),
    **_keys("integer", "max_in_cpu", default=1_000_000_000, bears=True),
    **_keys("boolean", "pin_memory", default=True, bears=True),
}

FP16: Mapping[str, Key] = {
    **_keys("boolean", "enabled", "auto_cast", "consecutive_hysteresis", default=False),
    **_keys("boolean", "fp16_master_weights_and_grads", default=False, bears=True),
    **_keys("number", "loss_scale"),
    **_keys("integer", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
}

BF16: Mapping[str, Key] = {
    **_keys("boolean", "enabled", "check_grad_overflow", default=False),
    **_keys("boolean", "immediate_grad_update", default=False, bears=True),
    **_keys("boolean", "bf16_master_weights_and_grads", "bf16_optimizer_states", default=False, bears=True),
}

TENSOR_PARALLEL: Mapping[str, Key] = {
    **_keys("integer", "autotp_size", default=0),
    **_keys("any", "dtype", "injection_policy_tuple", "partition_config", "preset_model"),
    **_keys("boolean", "tp_overlap_comm", default=False, bears=True),
    **_keys("boolean", "vocab_parallel_lm_head", bears=True),
    **_keys("text", "vocab_parallel_ce_backend", default="torch", bears=True),
    **_keys("section", "tensor_parallel", "tp"),
    **_keys("boolean", "keep_module_on_host", "replace_with_kernel_inject", "kernel_inject"),
}

DATA_TYPES: Mapping[str, Key] = {
    **_keys("text", "grad_accum_dtype"),
    **_keys("text", "param_dtype", "buffer_dtype", bears=True),
    **_keys("any", "keep_in_fp32_modules"),
}

PIPELINE: Mapping[str, Key] = {
    **_keys("any", "stages", "partition"),
    **_keys("integer", "activation_checkpoint_interval", default=0),
    **_keys("boolean", "seed_layers", "use_reentrant"),
    **_keys("boolean", "pipe_partitioned", "grad_partitioned", default=True),
}

ACTIVATION_CHECKPOINTING: Mapping[str, Key] = {
    **_keys("boolean", "partition_activations", "cpu_checkpointing", default=False, bears=True),
    **_keys("boolean", "contiguous_memory_optimization", default=False, bears=True),
    **_keys("boolean", "synchronize_checkpoint_boundary", "profile", default=False),
    **_keys("integer", "number_checkpoints"),
}

EXPERT_PARALLEL: Mapping[str, Key] = {
    **_keys("boolean", "enabled", default=False),
    **_keys("integer", "autoep_size", "expert_tensor_parallel_size", default=1),
    **_keys("any", "validate_folding_routing", "async_split_plan", "preset_model", "moe_layer_pattern"),
    **_keys("any", "expert_pattern", "router_pattern", "use_grouped_mm", "disable_triton_grouped_mm", "route_norm"),
    **_keys("any", "route_scale", "score_apply", "combine_impl", "row_weighting_impl", "gate_up_impl"),
    **_keys("any", "comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank", "num_expert_groups"),
    **_keys("any", "num_limited_groups", "score_func", "top_k", "load_balance_coeff", "routed_scaling_factor"),
    **_keys("any", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts"),
    **_keys("any", "shared_experts_pattern", "shared_experts_gate_pattern", "expert_activation"),
}

OPTIMIZER: Mapping[str, Key] = {
    **_keys("text", "type"),
    **_keys("section", "params"),
    **_keys("boolean", "legacy_fusion"),
}

LEGACY_ZERO: Mapping[str, str] = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": '"pin_memory" inside offload_optimizer and offload_param',
    "stage3_gather_fp16_weights_on_model_save": '"stage3_gather_16bit_weights_on_model_save"',
}
"""Old spellings that are still taken, with a warning (runtime/zero/config.py), and today's."""

LEGACY_UNKNOWN: Mapping[str, str] = {
    "cpu_offload_params": '"offload_param": {"device": "cpu"}',
    "cpu_offload_optimizer": '"offload_optimizer": {"device": "cpu"}',
    "stage3_max_live_params": '"stage3_max_live_parameters"',
}
"""Spellings of old documents and other frameworks that DeepSpeed 0.19 does not know, and today's."""

ADAM_OPTIMIZERS = ("adam", "adamw")
"""Two moments a parameter, as the memory estimate counts."""

AUTO_FILLED: Mapping[tuple[str, ...], str] = {
    ("train_batch_size",): "per_device_train_batch_size, gradient_accumulation_steps and the number of GPUs",
    ("train_micro_batch_size_per_gpu",): "per_device_train_batch_size",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    ("gradient_clipping",): "max_grad_norm",
    ("fp16", "enabled"): "fp16",
    ("bf16", "enabled"): "bf16",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "betas"): "adam_beta1 and adam_beta2",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_min_lr"): "nothing: it becomes 0",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    ("scheduler", "params", "total_num_steps"): "the number of steps",
    ("scheduler", "params", "warmup_num_steps"): "warmup_steps",
    ("zero_optimization", "reduce_bucket_size"): "the model's hidden size, squared",
    ("zero_optimization", "stage3_prefetch_bucket_size"): "0.9 times the model's hidden size, squared",
    ("zero_optimization", "stage3_param_persistence_threshold"): "10 times the model's hidden size",
}
"""What Hugging Face Trainer puts in the place of ``"auto"`` (transformers/integrations/deepspeed.py,
HfTrainerDeepSpeedConfig)."""

ARGUMENT_DEFAULTS: Mapping[str, object] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "fp16": False,
    "bf16": False,
}
"""TrainingArguments where nobody sets them (transformers/training_args.py)."""
