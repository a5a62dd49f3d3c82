#!/usr/bin/env bash
# llama3-70b on 8 GPUs (1 node x 8).
# Starts every process of the plan on this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# One hardware queue keeps communication ahead of the matrix multiplications it hides behind; Megatron refuses
# to start without it when tp or cp > 1 before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# shellcheck source=megatron_args.sh
source ./megatron_args.sh

exec torchrun \
  --standalone \
  --nproc-per-node 8 \
  "${MEGATRON_PATH:?set MEGATRON_PATH to a checkout of Megatron-LM}/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${DATA_ARGS[@]}" "$@"
