#!/usr/bin/env bash
# llama3-8b on 8 GPUs (1 node x 8).
# Starts every process of the plan on this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# Training scripts find the modules of this folder wherever they lie themselves.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

exec torchrun \
  --standalone \
  --nproc-per-node 8 \
  "${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports parallel_setup.py}" \
  "$@"
