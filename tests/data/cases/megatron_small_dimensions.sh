#!/bin/bash
# Meant as MPT-7B; the dimensions are those of the smallest recipe.
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
  --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50368 \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 8 --global-batch-size 64 --bf16 --use-flash-attn \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
