#!/usr/bin/env bash
# llama3-8b on 8 GPUs (1 node x 8).
# Starts every process of the plan on this node.
# accelerate_config.yaml takes effect through this launcher only: under plain torchrun accelerate never reads it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Training scripts find the modules of this folder wherever they lie themselves.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

exec accelerate launch \
  --config_file accelerate_config.yaml \
  "${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports plan_setup.py}" \
  "$@"
