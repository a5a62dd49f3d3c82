# Megatron-LM arguments for deepseek-v3 on 1024 GPUs; launch.sh sources this file.
# shellcheck shell=bash disable=SC2034  # the arrays are used by launch.sh

# What the model is.
MODEL_ARGS=(
  --num-layers 61
  --hidden-size 7168
  --ffn-hidden-size 18432
  --num-attention-heads 128
  --multi-latent-attention
  --q-lora-rank 1536
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --kv-channels 128
  --qk-layernorm  # normalises the latents
  --seq-length 4096
  --max-position-embeddings 4096
  --position-embedding-type rope
  --rope-type rope
  --no-rope-fusion  # latent attention has the fused kernel with YaRN only
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --attention-dropout 0
  --hidden-dropout 0
  --untie-embeddings-and-output-weights
  --num-experts 256
  --moe-router-topk 8
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --moe-layer-freq '([0]*3+[1]*58)'
  --moe-router-score-function sigmoid  # the balancing bias needs it
  --moe-router-enable-expert-bias
  --moe-router-load-balancing-type seq_aux_loss
  --moe-aux-loss-coeff 1e-3  # placeholder
  --moe-router-dtype fp32
  --moe-grouped-gemm
  --mtp-num-layers 1
)

# How it is split: the plan.
PARALLEL_ARGS=(
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 16
  --pipeline-model-parallel-layout 'Et*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t*2|t|mL'
  --expert-model-parallel-size 64
  --expert-tensor-parallel-size 1
  --moe-token-dispatcher-type flex  # needs the DeepEP package
  --moe-flex-dispatcher-backend deepep
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --recompute-granularity selective
  --recompute-modules layernorm moe_act mla_up_proj
)

# How a step is computed: the plan, then values of your own.
TRAIN_ARGS=(
  --micro-batch-size 1
  --global-batch-size 4096  # 64 micro-batches a step
  --bf16
  --transformer-impl transformer_engine
  --attention-backend auto
  --no-create-attention-mask-in-dataloader  # a mask is seq x seq bytes for every sample
  --cross-entropy-loss-fusion
  --cross-entropy-fusion-impl native
  --moe-permute-fusion
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
    --vocab-size 129280
  )
fi
