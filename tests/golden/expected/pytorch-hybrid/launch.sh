#!/usr/bin/env bash
# llama3-8b on 16 GPUs (2 nodes x 8).
# Run this script once on every node; README.md has the rank map.
#
#   HEAD_NODE   host name or address of the first node (every node must reach it)
#   HEAD_PORT   a free TCP port on it (default 29500)
#   JOB_ID      the same text on every node, different for every job
#   NODE_RANK   0 to 1; set it to fix which node holds which ranks (static rendezvous).
#               Without it the nodes are numbered in no order of yours (c10d rendezvous): groups inside a node stay
#               inside it, but neighbouring pipeline stages may end up far apart in the network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

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
  RENDEZVOUS=(--node-rank "$NODE_RANK" --master-addr "$HEAD_NODE" --master-port "$HEAD_PORT")
else
  RENDEZVOUS=(--rdzv-id "${JOB_ID:-plan-0123456789ab}" --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:$HEAD_PORT")
fi

exec torchrun \
  --nnodes 2 \
  --nproc-per-node 8 \
  "${RENDEZVOUS[@]}" \
  -m planner_validate.trainer.worker \
  --config run.json --out "${RESULTS:-results}" "$@"
