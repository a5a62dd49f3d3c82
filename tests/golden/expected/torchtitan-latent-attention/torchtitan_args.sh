# torchtitan arguments for deepseek-v3 on 256 GPUs; launch.sh sources this file.
# shellcheck shell=bash disable=SC2034  # the array is used by launch.sh
TORCHTITAN_ARGS=(
  # The model, its loss, its pipeline stages and what is recomputed: plan_config.py.
  --module plan_config
  --config plan

  # How it is split, and the batch: the plan.
  --parallelism.data_parallel_replicate_degree 1
  --parallelism.data_parallel_shard_degree 64
  --parallelism.fsdp_reshard_after_forward default
  --parallelism.tensor_parallel_degree 4
  --parallelism.context_parallel_degree 1
  --parallelism.pipeline_parallel_degree 1
  --parallelism.expert_parallel_degree 64
  --parallelism.spmd_backend partial_dtensor  # the default needs a PyTorch newer than 2.13
  --training.local_batch_size 1
  --training.global_batch_size 1024
  --training.seq_len 4096
  --training.mixed_precision_param bfloat16
  --training.disable_cuda_graphs  # pipelines and the standard expert dispatch refuse them

  # PLACEHOLDERS: choose these for your run; they change neither speed nor memory.
  --hf_assets_path "${HF_ASSETS:-./assets/hf}"
  --dataloader.dataset "${DATASET:-c4}"
  --training.steps "${TRAIN_STEPS:-20}"
  --metrics.log_freq 1
)
