"""llama3-8b on 16 GPUs as a configuration of torchtitan 0.3: `--module plan_config --config plan`.

Holds what has no command-line flag: the model with its exact dimensions, the loss, the pipeline stages and what is
recomputed. Parallelism and batch stand in torchtitan_args.sh.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

# The plan.
MODEL = {
    "layers": 32,
    "hidden": 4096,
    "ffn": 14336,
    "heads": 32,
    "vocab": 128256,
    "tied": False,
    "max_seq": 32768,
    "kv_heads": 8,
    "head_dim": 128,
    "qk_norm": False,
}
RECOMPUTE = "full"  # none, selective (every second matrix product is kept) or full
FLOAT8 = False  # linear layers multiply in fp8, scaled row by row
LOSS_CHUNKS = 8  # pieces of a sequence; one has logits at a time
LAYERS_PER_STAGE = None  # of the pipeline stages in model order; None: no pipeline

# PLACEHOLDERS: take them from the model's release; they change what is trained, neither speed nor memory.
ROPE_THETA = 500000.0
LEARNING_RATE = 3e-4

WEIGHTS = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}


def norm(width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})


def output(layer: int) -> dict:
    """Initialisation of the matrices that write to the residual stream: smaller in deeper layers."""
    return {**WEIGHTS, "weight": partial(nn.init.trunc_normal_, std=0.02 / (2 * (layer + 1)) ** 0.5)}


def feed_forward(layer: int, width: int):
    return make_ffn_config(
        dim=MODEL["hidden"], hidden_dim=width, w1_param_init=WEIGHTS, w2w3_param_init=output(layer)
    )


def layers() -> list:
    rope = ComplexRoPE.Config(dim=MODEL["head_dim"], max_seq_len=MODEL["max_seq"], theta=ROPE_THETA)
    blocks = []
    for layer in range(MODEL["layers"]):
        attention = make_gqa_config(
            dim=MODEL["hidden"],
            n_heads=MODEL["heads"],
            n_kv_heads=MODEL["kv_heads"],
            head_dim=MODEL["head_dim"],
            wqkv_param_init=WEIGHTS,
            wo_param_init=output(layer),
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=rope,
            qk_norm=norm(MODEL["head_dim"]) if MODEL["qk_norm"] else None,
        )
        blocks.append(
            Llama3TransformerBlock.Config(
                attention=attention,
                attention_norm=norm(MODEL["hidden"]),
                ffn_norm=norm(MODEL["hidden"]),
                feed_forward=feed_forward(layer, MODEL["ffn"]),
            )
        )
    return blocks


def model_spec() -> ModelSpec:
    width, vocab = MODEL["hidden"], MODEL["vocab"]
    blocks = layers()
    # A tied table is the head's weight, which is initialised once.
    start = skip_param_init if MODEL["tied"] else partial(nn.init.normal_, std=0.02)
    table = Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init={"weight": start})
    config = Llama3Model.Config(
        dim=width,
        vocab_size=vocab,
        enable_weight_tying=MODEL["tied"],
        tok_embeddings=table,
        norm=norm(width),
        lm_head=Linear.Config(in_features=width, out_features=vocab, param_init=WEIGHTS),
        layers=blocks,
    )
    if FLOAT8:
        from torchtitan.components.quantization import Float8LinearConverter

        # Head and embedding stay in 16 bits.
        converter = Float8LinearConverter.Config(
            recipe_name="rowwise", filter_fqns=["lm_head"], model_compile_enabled=True
        )
        config = converter.build().convert(config)
    return ModelSpec(
        name="llama3",
        flavor="plan",
        model=config,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def stage_modules() -> list[list[str]] | None:
    """Modules of every pipeline stage, in model order; None: no pipeline."""
    if LAYERS_PER_STAGE is None:
        return None
    stages, first = [], 0
    for count in LAYERS_PER_STAGE:
        stages.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def loss():
    whole = CrossEntropyLoss.Config(global_vocab_size=MODEL["vocab"])
    return ChunkedLossWrapper.Config(num_chunks=LOSS_CHUNKS, loss_fn=whole) if LOSS_CHUNKS > 1 else whole


def plan() -> Trainer.Config:
    checkpoints = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    return Trainer.Config(
        model_spec=model_spec(),
        loss=loss(),
        optimizer=default_adamw(lr=LEARNING_RATE),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        activation_checkpoint=checkpoints[RECOMPUTE],
        compile=CompileConfig(enable=True),
        parallelism=ParallelismConfig(module_fqns_per_model_part=stage_modules()),
    )
