#!/bin/bash
# A mixture of 43 layers with 128k tokens on 20 nodes of 8: five uneven stages.
torchrun --nproc_per_node 8 --nnodes 20 pretrain_gpt.py \
  --num-layers 43 --hidden-size 4096 --ffn-hidden-size 2048 --num-attention-heads 64 --kv-channels 128 \
  --group-query-attention --num-query-groups 8 --vocab-size 129280 --seq-length 131072 \
  --max-position-embeddings 131072 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm \
  --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 6 --moe-grouped-gemm \
  --moe-token-dispatcher-type alltoall --hidden-dropout 0 --attention-dropout 0 \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 5 --context-parallel-size 16 \
  --pipeline-model-parallel-layout "Et*8|t*9|t*9|t*9|t*8L" \
  --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 \
  --micro-batch-size 1 --global-batch-size 128 --bf16 --use-flash-attn \
  --no-create-attention-mask-in-dataloader \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
