#!/bin/bash
# Llama-3-70B on two nodes of 8.
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
  --group-query-attention --num-query-groups 8 --vocab-size 128256 --seq-length 4096 \
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm \
  --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --hidden-dropout 0 --attention-dropout 0 \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2 \
  --micro-batch-size 1 --global-batch-size 16 --use-flash-attn --use-distributed-optimizer
