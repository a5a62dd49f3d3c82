"""The keys that nanotron's strict loader knows, section by section, with the types it insists on.

Transcribed from the dataclasses of nanotron/config (config.py, parallelism_config.py, models_config.py) at 2411b022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "float", "bool", "text", "texts", "any"]


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    kind: Kind
    required: bool = False
    null: bool = False
    """null is accepted (the field is optional, or has no type that could refuse it)."""
    choices: tuple[str, ...] = ()
    """The only values, where there are few."""

    def accepts(self, value: Any) -> bool:
        """Whether the loader takes the value (it takes true and false for numbers, which nobody means)."""
        if value is None:
            return self.null
        if self.kind == "any":
            return True
        if self.kind == "bool":
            return isinstance(value, bool)
        if isinstance(value, bool):
            return False
        if self.kind == "text":
            return isinstance(value, str)
        if self.kind == "texts":
            return all(isinstance(entry, str) for entry in (value if isinstance(value, list) else [value]))
        return isinstance(value, int) or (self.kind == "float" and isinstance(value, float))

    def offers(self, value: Any) -> bool:
        """Whether a value of the right type is one of the choices."""
        return not self.choices or value is None or value in self.choices

    @property
    def allowed(self) -> str:
        """What is accepted, in words."""
        if self.choices:
            return ", ".join(self.choices) + (" or null" if self.null else "")
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "text": "text",
            "texts": "text or a list of texts",
            "any": "any",
        }
        return words[self.kind] + (" or null" if self.null else "")


def _keys(
    kind: Kind, *names: str, required: bool = False, null: bool = False, choices: tuple[str, ...] = ()
) -> dict[str, Key]:
    return {name: Key(kind, required, null, choices) for name in names}


_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
_ATTENTION = ("flash_attention_2", "flex_attention", "sdpa", "ring_flash_triton", "ring", "llama3_ring_attention")
"""nanotron/nn/attention.py, ALL_ATTENTION_FUNCTIONS."""


SECTIONS: dict[str, dict[str, Key]] = {
    "general": {
        **_keys("text", "project", required=True),
        **_keys("text", "run", "benchmark_csv_path", null=True),
        **_keys("int", "seed", "step", "consumed_train_samples", null=True),
        **_keys("bool", "ignore_sanity_checks"),
    },
    "parallelism": {
        **_keys("int", "dp", "pp", "tp", required=True),
        **_keys("int", "expert_parallel_size", "context_parallel_size"),
        **_keys("text", "pp_engine", "tp_mode", null=True),
        **_keys("bool", "tp_linear_async_communication", null=True),
        **_keys("bool", "recompute_layer", "tp_recompute_allgather"),
    },
    "model": {
        **_keys("any", "model_config", "init_method", required=True),
        **_keys("text", "dtype", null=True),
        **_keys("int", "make_vocab_size_divisible_by", "ddp_bucket_cap_mb"),
    },
    "tokenizer": {
        **_keys("text", "tokenizer_name_or_path", "tokenizer_revision", null=True),
        **_keys("int", "tokenizer_max_length", null=True),
    },
    "checkpoints": {
        **_keys("text", "checkpoints_path", required=True),
        **_keys("int", "checkpoint_interval", required=True),
        **_keys("bool", "save_initial_state", "save_final_state", "load_lr_scheduler", "load_optimizer", null=True),
        **_keys("bool", "checkpoints_path_is_shared_file_system", null=True),
        **_keys("text", "resume_checkpoint_path", null=True),
    },
    "logging": {
        **_keys("text", "log_level", "log_level_replica", null=True, choices=_LEVELS),
        **_keys("int", "iteration_step_info_interval", null=True),
    },
    "metrics_logging": _keys("int", "log_level", "log_detail_interval"),
    "tokens": {
        **_keys(
            "int",
            "sequence_length",
            "train_steps",
            "micro_batch_size",
            "batch_accumulation_per_replica",
            required=True,
        ),
        **_keys("int", "val_check_interval", "limit_val_batches", "limit_test_batches", null=True),
    },
    "optimizer": {
        **_keys("any", "optimizer_factory", "learning_rate_scheduler", required=True),
        **_keys("int", "zero_stage", required=True),
        **_keys("float", "weight_decay", required=True),
        **_keys("float", "clip_grad", null=True),
        **_keys("bool", "accumulate_grad_in_fp32", required=True),
        **_keys("any", "weight_decay_exclude_named_params", null=True),
    },
    "profiler": {
        **_keys("text", "profiler_export_path", null=True),
        **_keys("int", "wait", "warmup", "active", "repeat", "skip_first"),
        **_keys("bool", "record_shapes", "profile_memory", "with_stack", "export_chrome_trace"),
    },
}
"""Sections whose keys are checked."""

OTHER_SECTIONS = ("data_stages", "lighteval", "s3_upload")
REQUIRED_SECTIONS = ("general", "parallelism", "model")
"""What the loader insists on."""
TRAINER_SECTIONS = ("tokens", "optimizer", "data_stages", "checkpoints", "logging")
"""What the loader lets pass and the trainer cannot do without."""

STAGE = {
    **_keys("text", "name", required=True),
    **_keys("int", "start_training_step", required=True),
    **_keys("any", "data", required=True),
    **_keys("int", "sequence_length", null=True),
}
DATA = {
    # Fields without a default, though null is a value of both.
    **_keys("any", "dataset", null=True),
    **_keys("int", "seed", null=True),
    **_keys("int", "num_loading_workers", null=True),
}
_HUGGING_FACE = {
    **_keys("any", "hf_dataset_or_datasets", required=True),
    **_keys("any", "hf_dataset_splits", null=True),
    **_keys("text", "hf_dataset_config_name", null=True),
    **_keys("int", "dataset_processing_num_proc_per_process", null=True),
    **_keys("bool", "dataset_overwrite_cache", null=True),
}
DATASETS: dict[str, dict[str, Key]] = {
    "hf_dataset_or_datasets": {
        **_HUGGING_FACE,
        **_keys("text", "text_column_name", null=True),
        **_keys("bool", "sft_dataloader", null=True),
        **_keys("int", "debug_max_samples", null=True),
    },
    "dataset_folder": {
        **_keys("texts", "dataset_folder", required=True),
        **_keys("texts", "dataset_read_path", null=True),
        **_keys("any", "dataset_weights", "dataset_max_tokens", null=True),
        **_keys("text", "tokenizer_name", null=True),
        **_keys("int", "vocab_size", "token_size_in_bytes", null=True),
        **_keys("bool", "return_positions", "skip_in_stream", "pad_samples_to_global_batch_size", null=True),
        **_keys("bool", "shuffle_files", "use_old_brrr_dataloader", null=True),
    },
}
"""Datasets by the key that only they have: of the Hugging Face hub (pre-training or fine-tuning), and tokenized."""
ADAM = {
    **_keys("float", "adam_eps", "adam_beta1", "adam_beta2", required=True),
    **_keys("bool", "torch_adam_is_fused", required=True),
    # Other names pass the loader and stop the trainer (nanotron/helpers.py, basic_optimizer_builder).
    **_keys("text", "name", choices=("adamW",)),
}
SCHEDULER = {
    **_keys("float", "learning_rate", required=True),
    **_keys("int", "lr_warmup_steps"),
    **_keys("int", "lr_decay_steps", "lr_decay_starting_step", null=True),
    **_keys("text", "lr_warmup_style", required=True, choices=("linear", "constant")),
    **_keys("text", "lr_decay_style", choices=("linear", "cosine", "1-sqrt")),
    **_keys("float", "min_decay_lr"),
}

_BOTH = {
    **_keys(
        "int",
        "bos_token_id",
        "eos_token_id",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "pretraining_tp",
        "vocab_size",
    ),
    **_keys("int", "num_key_value_heads", "pad_token_id", null=True),
    **_keys("text", "hidden_act"),
    **_keys("text", "_attn_implementation", null=True, choices=_ATTENTION),
    **_keys("float", "initializer_range", "rms_norm_eps", "rope_theta", "z_loss_coefficient"),
    **_keys("any", "rope_scaling", null=True),
    **_keys("bool", "attention_bias", "rope_interleaved", "tie_word_embeddings", "use_cache", "z_loss_enabled"),
}
LLAMA = {**_BOTH, **_keys("bool", "is_llama_config")}
QWEN2 = {
    **_BOTH,
    **_keys("bool", "is_qwen2_config", "_fused_rotary_emb", "_fused_rms_norm", "_use_qkv_packed", "_use_doc_masking"),
    **_keys("bool", "log_attn_probs"),
    **_keys("float", "rope_seq_len_interpolation_factor", null=True),
    **_keys("text", "flex_attention_mask", null=True),
    **_keys("int", "sliding_window_size", "no_rope_layer", "ring_attn_heads_k_stride", null=True),
    **_keys("any", "moe_config", null=True),
}
MODEL_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
"""Dimensions of both model classes where the file says nothing."""
MOE_DEFAULTS = {
    "num_experts": 8,
    "top_k": 2,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
