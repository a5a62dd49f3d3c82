"""qwen3-30b-a3b on 64 GPUs as a configuration of torchtitan 0.3: `--module plan_config --config plan`.

Holds what has no command-line flag: the model with its exact dimensions, the loss, the pipeline stages and what is
recomputed. Parallelism and batch stand in torchtitan_args.sh.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

# The plan.
MODEL = {
    "layers": 48,
    "hidden": 2048,
    "ffn": 6144,
    "heads": 32,
    "vocab": 151936,
    "tied": False,
    "max_seq": 40960,
    "kv_heads": 4,
    "head_dim": 128,
    "qk_norm": True,
    "experts": 128,
    "top_k": 8,
    "expert_ffn": 768,
    "shared_ffn": 0,
    "dense_first": 0,
    "every": 1,
    "offset": 0,
    "expert_bias": False,
}
RECOMPUTE = "selective"  # none, selective (every second matrix product is kept) or full
FLOAT8 = False  # linear layers multiply in fp8, scaled row by row
LOSS_CHUNKS = 8  # pieces of a sequence; one has logits at a time
LAYERS_PER_STAGE = None  # of the pipeline stages in model order; None: no pipeline

# PLACEHOLDERS: take them from the model's release; they change what is trained, neither speed nor memory.
ROPE_THETA = 1000000.0
ROUTER_SCORES = "softmax"  # softmax or sigmoid
ROUTER_NORM = True
LEARNING_RATE = 3e-4

WEIGHTS = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
EXPERTS = {name: WEIGHTS["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


def norm(width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})


def output(layer: int) -> dict:
    """Initialisation of the matrices that write to the residual stream: smaller in deeper layers."""
    return {**WEIGHTS, "weight": partial(nn.init.trunc_normal_, std=0.02 / (2 * (layer + 1)) ** 0.5)}


def has_experts(layer: int) -> bool:
    return layer >= MODEL["dense_first"] and (layer - MODEL["offset"]) % MODEL["every"] == 0


def experts(layer: int):
    return make_moe_config(
        num_experts=MODEL["experts"],
        router=make_router_config(
            dim=MODEL["hidden"],
            num_experts=MODEL["experts"],
            gate_param_init=WEIGHTS,
            top_k=MODEL["top_k"],
            score_func=ROUTER_SCORES,
            route_norm=ROUTER_NORM,
        ),
        routed_experts=make_routed_experts_config(
            dim=MODEL["hidden"],
            hidden_dim=MODEL["expert_ffn"],
            num_experts=MODEL["experts"],
            top_k=MODEL["top_k"],
            param_init={**EXPERTS, "w2_EDF": output(layer)["weight"]},
            comm_backend="standard",
        ),
        shared_experts=feed_forward(layer, MODEL["shared_ffn"]) if MODEL["shared_ffn"] else None,
    )


def feed_forward(layer: int, width: int):
    return make_ffn_config(
        dim=MODEL["hidden"], hidden_dim=width, w1_param_init=WEIGHTS, w2w3_param_init=output(layer)
    )


def layers() -> list:
    rope = CosSinRoPE.Config(dim=MODEL["head_dim"], max_seq_len=MODEL["max_seq"], theta=ROPE_THETA)
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
            Qwen3TransformerBlock.Config(
                attention=attention,
                attention_norm=norm(MODEL["hidden"]),
                ffn_norm=norm(MODEL["hidden"]),
                moe=experts(layer) if has_experts(layer) else None,
                feed_forward=None if has_experts(layer) else feed_forward(layer, MODEL["ffn"]),
            )
        )
    return blocks


def model_spec() -> ModelSpec:
    width, vocab = MODEL["hidden"], MODEL["vocab"]
    blocks = layers()
    # A tied table is the head's weight, which is initialised once.
    start = skip_param_init if MODEL["tied"] else partial(nn.init.normal_, std=0.02)
    table = Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init={"weight": start})
    config = Qwen3Model.Config(
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
        name="qwen3",
        flavor="plan",
        model=config,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=Qwen3StateDictAdapter,
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
