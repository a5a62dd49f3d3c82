#!/usr/bin/env bash
# llama3-8b on 16 GPUs (2 nodes x 8).
# Run this script once on every node; README.md has the rank map.
#
#   HEAD_NODE   host name or address of the first node (every node must reach it)
#   HEAD_PORT   a free TCP port on it (default 29500)
#   NODE_RANK   0 to 1; set it to fix which node holds which ranks (static rendezvous).
#               Without it the nodes are numbered in no order of yours (c10d rendezvous).
# accelerate_config.yaml takes effect through this launcher only: under plain torchrun accelerate never reads it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Training scripts find the modules of this folder wherever they lie themselves.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

HEAD_NODE="${HEAD_NODE:?set HEAD_NODE to the name or address of the first node}"
HEAD_PORT="${HEAD_PORT:-29500}"
if [[ -n "${NODE_RANK:-}" ]]; then
  # A number that no node has would leave all others waiting.
  if [[ ! "$NODE_RANK" =~ ^[0-9]+$ ]] || (( 10#$NODE_RANK >= 2 )); then
    echo "NODE_RANK must be 0 to 1, got $NODE_RANK" >&2
    exit 2
  fi
  RENDEZVOUS=(--machine_rank "$NODE_RANK" --rdzv_backend static)
else
  # c10d gives the numbers; accelerate itself would look on machine 0 whether the port is still free.
  RENDEZVOUS=(--machine_rank 1 --rdzv_backend c10d)
fi

exec accelerate launch \
  --config_file accelerate_config.yaml \
  --main_process_ip "$HEAD_NODE" \
  --main_process_port "$HEAD_PORT" \
  "${RENDEZVOUS[@]}" \
  "${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports plan_setup.py}" \
  "$@"
