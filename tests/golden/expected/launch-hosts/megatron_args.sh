# Megatron-LM arguments for llama3-70b on 32 GPUs; launch.sh sources this file.
# shellcheck shell=bash disable=SC2034  # the arrays are used by launch.sh

# What the model is.
MODEL_ARGS=(
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --seq-length 8192
  --max-position-embeddings 8192
  --position-embedding-type rope
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --attention-dropout 0
  --hidden-dropout 0
  --untie-embeddings-and-output-weights
)

# How it is split: the plan.
PARALLEL_ARGS=(
  --tensor-model-parallel-size 8
  --sequence-parallel
  --tp-comm-overlap
  --pipeline-model-parallel-size 4
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
)

# How a step is computed: the plan, then values of your own.
TRAIN_ARGS=(
  --micro-batch-size 1
  --global-batch-size 512  # 512 micro-batches a step
  --bf16
  --transformer-impl transformer_engine
  --attention-backend auto
  --no-create-attention-mask-in-dataloader  # a mask is seq x seq bytes for every sample
  --cross-entropy-loss-fusion
  --cross-entropy-fusion-impl native
  # PLACEHOLDERS: choose these for your run; they change neither speed nor memory.
  --train-iters "${TRAIN_ITERS:-20}"
  --lr "${LEARNING_RATE:-1.5e-4}"
  --min-lr "${MIN_LEARNING_RATE:-1.5e-5}"
  --lr-decay-style cosine
  --lr-warmup-iters "${WARMUP_ITERS:-2}"
  --weight-decay 0.1
  --clip-grad 1.0
  --adam-beta1 0.9
  --adam-beta2 0.95
  --init-method-std 0.02
  --eval-iters 0
  --log-interval 1
  --log-throughput
  --distributed-timeout-minutes 60
)

# PLACEHOLDER: where checkpoints go; without CHECKPOINT_DIR none are written.
if [[ -n "${CHECKPOINT_DIR:-}" ]]; then
  TRAIN_ARGS+=(--save "$CHECKPOINT_DIR" --load "$CHECKPOINT_DIR" --save-interval "${SAVE_INTERVAL:-500}" --ckpt-format torch_dist)
fi

# PLACEHOLDER: your data.  DATA_PATH is the prefix of a tokenized data set (without .bin and .idx), TOKENIZER_MODEL a
# Hugging Face tokenizer; without DATA_PATH the run uses mock data and needs neither.
if [[ -n "${DATA_PATH:-}" ]]; then
  DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split '99,1,0'
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${TOKENIZER_MODEL:?set TOKENIZER_MODEL to a Hugging Face tokenizer}"
  )
else
  DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 128256
  )
fi
