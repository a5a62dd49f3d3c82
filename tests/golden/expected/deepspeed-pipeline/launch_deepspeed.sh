#!/usr/bin/env bash
# llama3-8b by DeepSpeed's own launcher: start it on the first node only, it reaches the others with pdsh over ssh.
# Put your host names into the hostfile first.  The launcher sends the variables in .deepspeed_env to the other nodes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# Training scripts find the modules of this folder wherever they lie themselves.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

exec deepspeed \
  --hostfile hostfile \
  --master_addr "${HEAD_NODE:-node001}" \
  --master_port "${HEAD_PORT:-29500}" \
  "${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports parallel_setup.py}" \
  "$@"
