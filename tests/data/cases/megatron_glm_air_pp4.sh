#!/bin/bash
# GLM-4.5-Air (46 layers, 128 experts) on 8 nodes.
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \
  --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --num-attention-heads 96 --kv-channels 128 \
  --group-query-attention --num-query-groups 8 --vocab-size 151552 --seq-length 4096 \
  --max-position-embeddings 131072 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm \
  --swiglu --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights \
  --num-experts 128 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408 --moe-router-topk 8 \
  --moe-layer-freq "([0]*1+[1]*45)" --moe-grouped-gemm --moe-token-dispatcher-type alltoall \
  --hidden-dropout 0 --attention-dropout 0 \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 \
  --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --micro-batch-size 2 --global-batch-size 16 --bf16 --use-flash-attn \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
