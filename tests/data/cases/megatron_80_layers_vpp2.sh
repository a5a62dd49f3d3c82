#!/bin/bash
# 80 layers over 16 stages, 2 virtual stages on each.
PP=16
VPP=2
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py \
  --num-layers 80 --hidden-size 4096 --num-attention-heads 32 \
  --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \
  --hidden-dropout 0 --attention-dropout 0 \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size $PP \
  --num-virtual-stages-per-pipeline-rank $VPP \
  --micro-batch-size 1 --global-batch-size 128 --bf16 --use-flash-attn \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
