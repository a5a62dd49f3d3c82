#!/usr/bin/env bash
# A 13B model on four nodes of eight GPUs, as such scripts look after a year of use.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-4}
TP=4
PP=4

MODEL_ARGS=(
  --num-layers 42 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40
  --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0
)
TRAIN_ARGS=(
  --micro-batch-size 1 --global-batch-size 128 --bf16
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  # --sequence-parallel   switched off while debugging
)

torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NNODES" pretrain_gpt.py \
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
  "${MODEL_ARGS[@]}" "${TRAIN_ARGS[@]}"
