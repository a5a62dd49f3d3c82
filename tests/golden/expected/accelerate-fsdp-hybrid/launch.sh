#!/usr/bin/env bash
# llama3-8b on 16 GPUs (2 nodes x 8).
# Run this script once on every node; README.md has the rank map.
#
#   HEAD_NODE   host name or address of the first node (every node must reach it)
#   HEAD_PORT   a free TCP port on it (default 29500)
#   NODE_RANK   0 to 1, different on every node; the node with HEAD_NODE is 0
# accelerate_config.yaml takes effect through this launcher only: under plain torchrun accelerate never reads it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

exec accelerate launch \
  --config_file accelerate_config.yaml \
  --machine_rank "${NODE_RANK:?set NODE_RANK to the number of this node, 0 to 1}" \
  --main_process_ip "${HEAD_NODE:-node001}" \
  --main_process_port "${HEAD_PORT:-29500}" \
  "${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports plan_setup.py}" \
  "$@"
