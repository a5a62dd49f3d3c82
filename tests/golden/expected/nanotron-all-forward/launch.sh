#!/usr/bin/env bash
# llama3-8b on 8 GPUs (1 node x 8).
# Starts every process of the plan on this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# One hardware queue keeps the asynchronous collectives ahead of the matrix multiplications that hide them; the
# tensor-parallel layers refuse to be built without it.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

exec torchrun \
  --standalone \
  --nproc-per-node 8 \
  "${NANOTRON_PATH:?set NANOTRON_PATH to a checkout of nanotron}/run_train.py" \
  --config-file nanotron.yaml "$@"
