#!/bin/bash
# GPT-2 with 30 layers on one node of 8.
GPUS_PER_NODE=8
MODEL=(
  --num-layers 30 --hidden-size 2048 --num-attention-heads 16
  --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257
  --hidden-dropout 0 --attention-dropout 0
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 pretrain_gpt.py "${MODEL[@]}" \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \
  --micro-batch-size 2 --global-batch-size 64 --bf16 --use-flash-attn \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
