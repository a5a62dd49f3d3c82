"""Which field of Megatron-Bridge's ConfigContainer says what an argument of Megatron-LM says.

One table serves the renderer and the reader, so the two spellings cannot drift apart (Megatron-Bridge 0.6,
megatron/bridge/training/config.py and models/gpt_provider.py)."""

from __future__ import annotations

VALUES: dict[str, str] = {
    **{
        flag: "model." + flag.replace("-", "_")
        for flag in (
            "num-layers",
            "hidden-size",
            "ffn-hidden-size",
            "num-attention-heads",
            "num-query-groups",
            "kv-channels",
            "q-lora-rank",
            "kv-lora-rank",
            "qk-head-dim",
            "qk-pos-emb-head-dim",
            "v-head-dim",
            "window-attn-skip-freq",
            "softmax-type",
            "position-embedding-type",
            "rope-type",
            "normalization",
            "attention-dropout",
            "hidden-dropout",
            "moe-router-topk",
            "moe-ffn-hidden-size",
            "moe-shared-expert-intermediate-size",
            "moe-latent-size",
            "moe-router-score-function",
            "moe-router-load-balancing-type",
            "moe-aux-loss-coeff",
            "moe-router-dtype",
            "mtp-num-layers",
            "tensor-model-parallel-size",
            "context-parallel-size",
            "cp-comm-type",
            "pipeline-model-parallel-size",
            "pipeline-model-parallel-layout",
            "expert-model-parallel-size",
            "expert-tensor-parallel-size",
            "moe-token-dispatcher-type",
            "moe-flex-dispatcher-backend",
            "recompute-granularity",
            "recompute-method",
            "recompute-num-layers",
            "transformer-impl",
            "attention-backend",
            "cross-entropy-fusion-impl",
            "make-vocab-size-divisible-by",
            "vocab-size",
            "seq-length",
            "cuda-graph-impl",
            "moe-expert-capacity-factor",
        )
    },
    "num-experts": "model.num_moe_experts",
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "decoder-first-pipeline-num-layers": "model.num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "model.num_layers_in_last_pipeline_stage",
    "microbatch-group-size-per-virtual-pipeline-stage": "model.microbatch_group_size_per_vp_stage",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "optimizer-offload-fraction": "optimizer.optimizer_offload_fraction",
    "exp-avg-dtype": "optimizer.exp_avg_dtype",
    "exp-avg-sq-dtype": "optimizer.exp_avg_sq_dtype",
    "main-grads-dtype": "optimizer.main_grads_dtype",
    "optimizer": "optimizer.optimizer",
    "fp8-format": "mixed_precision.fp8",
    "fp8-recipe": "mixed_precision.fp8_recipe",
    "fp4-format": "mixed_precision.fp4",
    "fp4-recipe": "mixed_precision.fp4_recipe",
}
"""Arguments with a value -> field of the same value."""

LISTS: dict[str, str] = {"recompute-modules": "model.recompute_modules", "window-size": "model.window_size"}
"""Arguments with several values -> field that takes a list of them."""

SWITCHES: dict[str, tuple[str, bool]] = {
    "multi-latent-attention": ("model.multi_latent_attention", True),
    "qk-layernorm": ("model.qk_layernorm", True),
    "attention-output-gate": ("model.attention_output_gate", True),
    "no-rope-fusion": ("model.apply_rope_fusion", False),
    "disable-bias-linear": ("model.add_bias_linear", False),
    "add-qkv-bias": ("model.add_qkv_bias", True),
    "untie-embeddings-and-output-weights": ("model.share_embeddings_and_output_weights", False),
    "moe-shared-expert-gate": ("model.moe_shared_expert_gate", True),
    "moe-router-enable-expert-bias": ("model.moe_router_enable_expert_bias", True),
    "moe-router-pre-softmax": ("model.moe_router_pre_softmax", True),
    "moe-grouped-gemm": ("model.moe_grouped_gemm", True),
    "moe-permute-fusion": ("model.moe_permute_fusion", True),
    "moe-pad-expert-input-to-capacity": ("model.moe_pad_expert_input_to_capacity", True),
    "overlap-moe-expert-parallel-comm": ("model.overlap_moe_expert_parallel_comm", True),
    "sequence-parallel": ("model.sequence_parallel", True),
    "tp-comm-overlap": ("model.tp_comm_overlap", True),
    "cross-entropy-loss-fusion": ("model.cross_entropy_loss_fusion", True),
    "no-gradient-accumulation-fusion": ("model.gradient_accumulation_fusion", False),
    "deterministic-mode": ("model.deterministic_mode", True),
    "use-distributed-optimizer": ("ddp.use_distributed_optimizer", True),
    "overlap-grad-reduce": ("ddp.overlap_grad_reduce", True),
    "overlap-param-gather": ("ddp.overlap_param_gather", True),
    "use-megatron-fsdp": ("ddp.use_megatron_fsdp", True),
    "use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer", True),
    "optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload", True),
    "overlap-cpu-optimizer-d2h-h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d", True),
    "fp8-param-gather": ("mixed_precision.fp8_param_gather", True),
}
"""Switches -> field and the value that the switch stands for."""

RECIPE = "vanilla_gpt_pretrain_config"
"""Megatron-Bridge's recipe without a model of its own (megatron/bridge/recipes/gpt): it has pretrain_gpt.py's defaults,
so every model that Megatron-LM's arguments describe goes through it and none has to be fetched from a hub."""

RECIPE_SWITCHES = frozenset({"cross-entropy-loss-fusion"})
"""Switches that this recipe has set, unlike pretrain_gpt.py."""

PRECISION = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp32": "None"}
"""Names of its mixed-precision recipes; 8- and 4-bit formats are set on top of bf16."""
