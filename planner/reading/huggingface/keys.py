"""Names that accelerate 1.15 and transformers 5.23 read from their files; everything else is refused or ignored.

Plain lists, each with the place in the framework that it was read from.
"""

from __future__ import annotations


def _names(text: str, prefix: str = "") -> frozenset[str]:
    """The words of ``text``, each after ``prefix``."""
    return frozenset(prefix + word for word in text.split())


CLUSTER = _names(
    """compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank
    num_machines gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function
    enable_cpu_affinity fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config
    mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm
    tpu_env dynamo_config fp16 dynamo_backend"""
)
"""Top level (accelerate/commands/config/config_args.py, ClusterConfig and process_config); others are a ValueError."""

NESTED: dict[str, frozenset[str]] = {
    # Names as launch arguments; a section with a prefix may leave it out (commands/launch.py,
    # _validate_launch_command).
    "fsdp_config": _names(
        """version offload_params min_num_params sharding_strategy reshard_after_forward auto_wrap_policy
        transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params
        cpu_ram_efficient_loading sync_module_states activation_checkpointing activation_checkpointing_offload""",
        prefix="fsdp_",
    ),
    "deepspeed_config": _names(
        """deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
    offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping
    zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter
    deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names"""
    ),
    "parallelism_config": _names(
        """dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend
        sp_seq_length sp_seq_length_is_variable sp_attn_implementation""",
        prefix="parallelism_config_",
    ),
    "megatron_lm_config": _names(
        """tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
        optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree
        num_micro_batches sequence_parallelism recompute_activations use_distributed_optimizer gradient_clipping
        recompute_granularity recompute_method recompute_num_layers attention_backend expert_model_parallel_size
        context_parallel_size attention_dropout hidden_dropout attention_softmax_in_fp32
        expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings""",
        prefix="megatron_lm_",
    ),
    "fp8_config": _names(
        """backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo
        override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim""",
        prefix="fp8_",
    ),
}
"""Nested keys that a launch argument takes; accelerate ignores all others without a word."""

PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_"}
"""Sections in which a key without the prefix gets it."""

BESIDE_DEEPSPEED_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys that accelerate refuses beside deepspeed_config_file, like mixed_precision at the top
(accelerate/utils/dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks)."""

ARGUMENTS = _names(
    """output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
    neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps
    logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node
    save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
    hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
    accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
    ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank"""
)
"""Fields of transformers.TrainingArguments 5.23."""

REMOVED_ARGUMENTS = {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "group_by_length": "train_sampling_strategy",
    "half_precision_backend": "",
    "fp16_opt_level": "",
    "fp16_backend": "",
    "tpu_num_cores": "",
    "past_index": "",
    "warmup_ratio": "warmup_steps",
    "logging_dir": "",
    "overwrite_output_dir": "",
    "save_safetensors": "",
    "fsdp_min_num_params": "fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config",
    "torchdynamo": "torch_compile_backend",
    "include_tokens_per_second": "",
    "use_mps_device": "",
    "use_ipex": "",
    "jit_mode_eval": "",
    "ray_scope": "",
    "mp_parameters": "",
    "adafactor": "optim",
    "sharded_ddp": "fsdp",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id",
    "push_to_hub_token": "hub_token",
}
"""Arguments of older versions that 5.23 no longer knows, with the name that took their place."""

SUBCLASS_ARGUMENTS = _names(
    """max_length max_seq_length packing packing_strategy eval_packing padding_free dataset_text_field
    dataset_num_proc dataset_kwargs model_init_kwargs assistant_only_loss completion_only_loss
    chat_template_path eos_token pad_token shuffle_dataset loss_type pad_to_multiple_of
    predict_with_generate generation_max_length generation_num_beams sortish_sampler generation_config
    truncation_mode activation_offloading beta max_prompt_length max_completion_length"""
)
"""Arguments that TRL's and transformers' own subclasses add."""

SCRIPT_ARGUMENTS = _names(
    """model_name_or_path model_revision dtype torch_dtype attn_implementation trust_remote_code use_peft lora_r
    lora_alpha lora_dropout lora_target_modules lora_modules_to_save load_in_4bit load_in_8bit bnb_4bit_quant_type
    use_bnb_nested_quant dataset_name dataset_config dataset_mixture dataset_train_split dataset_test_split
    dataset_streaming gradient_checkpointing_use_reentrant ignore_bias_buffers"""
)
"""Arguments of the model and the data set that stand beside them in files of TRL's scripts."""
