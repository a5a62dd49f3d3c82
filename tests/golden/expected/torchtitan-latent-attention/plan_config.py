"""deepseek-v3 on 256 GPUs as a configuration of torchtitan 0.3: `--module plan_config --config plan`.

Holds what has no command-line flag: the model with its exact dimensions, the loss, the pipeline stages and what is
recomputed. Parallelism and batch stand in torchtitan_args.sh.
"""

from __future__ import annotations

import copy
from functools import partial

from torch import nn
from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.deepseek_v3 import build_mla_moe_layers
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
from torchtitan.models.deepseek_v3.mtp import MTPLoss, MTPTransformerBlock
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

# The plan.
MODEL = {
    "layers": 61,
    "hidden": 7168,
    "ffn": 18432,
    "heads": 128,
    "vocab": 129280,
    "tied": False,
    "max_seq": 163840,
    "q_lora": 1536,
    "kv_lora": 512,
    "qk_nope": 128,
    "qk_rope": 64,
    "v_head": 128,
    "experts": 256,
    "top_k": 8,
    "expert_ffn": 2048,
    "shared_ffn": 2048,
    "dense_first": 3,
    "every": 1,
    "offset": 0,
    "expert_bias": True,
    "mtp_layers": 1,
}
RECOMPUTE = "full"  # none, selective (every second matrix product is kept) or full
FLOAT8 = False  # linear layers multiply in fp8, scaled row by row
LOSS_CHUNKS = 1  # pieces of a sequence; one has logits at a time
LAYERS_PER_STAGE = None  # of the pipeline stages in model order; None: no pipeline

# PLACEHOLDERS: take them from the model's release; they change what is trained, neither speed nor memory.
ROPE_THETA = 10000.0
ROUTER_SCORES = "sigmoid"  # softmax or sigmoid
ROUTER_NORM = True
LEARNING_RATE = 3e-4

WEIGHTS = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
EXPERTS = {name: WEIGHTS["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


def norm(width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})


def output(layer: int) -> dict:
    """Initialisation of the matrices that write to the residual stream: smaller in deeper layers."""
    return {**WEIGHTS, "weight": partial(nn.init.trunc_normal_, std=0.02 / (2 * (layer + 1)) ** 0.5)}


def layers() -> list:
    rope = ComplexRoPE.Config(dim=MODEL["qk_rope"], max_seq_len=MODEL["max_seq"], theta=ROPE_THETA)
    return build_mla_moe_layers(
        n_layers=MODEL["layers"],
        n_dense_layers=MODEL["dense_first"],
        dim=MODEL["hidden"],
        n_heads=MODEL["heads"],
        q_lora_rank=MODEL["q_lora"],
        kv_lora_rank=MODEL["kv_lora"],
        qk_nope_head_dim=MODEL["qk_nope"],
        qk_rope_head_dim=MODEL["qk_rope"],
        v_head_dim=MODEL["v_head"],
        mscale=1.0,
        dense_hidden_dim=MODEL["ffn"],
        moe_hidden_dim=MODEL["expert_ffn"],
        num_experts=MODEL["experts"],
        num_shared_experts=MODEL["shared_ffn"] // MODEL["expert_ffn"],
        router_top_k=MODEL["top_k"],
        router_score_func=ROUTER_SCORES,
        router_route_norm=ROUTER_NORM,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=WEIGHTS,
        norm_init={"weight": nn.init.ones_},
        depth_init=output,
        depth_experts_init=lambda layer: {**EXPERTS, "w2_EDF": output(layer)["weight"]},
        rope=rope,
    )


def prediction_blocks(last) -> list:
    """Each repeats the last layer behind the fusion of two streams."""
    width = MODEL["hidden"]
    return [
        MTPTransformerBlock.Config(
            attention=copy.deepcopy(last.attention),
            feed_forward=copy.deepcopy(last.feed_forward),
            moe=copy.deepcopy(last.moe),
            attention_norm=norm(width),
            ffn_norm=norm(width),
            enorm=norm(width),
            hnorm=norm(width),
            mtp_norm=norm(width),
            eh_proj=Linear.Config(in_features=2 * width, out_features=width, bias=False, param_init=WEIGHTS),
        )
        for _ in range(MODEL["mtp_layers"])
    ]


def model_spec() -> ModelSpec:
    width, vocab = MODEL["hidden"], MODEL["vocab"]
    blocks = layers()
    # A tied table is the head's weight, which is initialised once.
    start = skip_param_init if MODEL["tied"] else partial(nn.init.normal_, std=0.02)
    table = Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init={"weight": start})
    config = DeepSeekV3Model.Config(
        dim=width,
        vocab_size=vocab,
        enable_weight_tying=MODEL["tied"],
        tok_embeddings=table,
        norm=norm(width),
        lm_head=Linear.Config(in_features=width, out_features=vocab, param_init=WEIGHTS),
        layers=blocks,
        mtp_layers=prediction_blocks(blocks[-1]),
    )
    if FLOAT8:
        from torchtitan.components.quantization import Float8LinearConverter

        # Head and embedding stay in 16 bits.
        converter = Float8LinearConverter.Config(
            recipe_name="rowwise", filter_fqns=["lm_head"], model_compile_enabled=True
        )
        config = converter.build().convert(config)
    return ModelSpec(
        name="deepseek_v3",
        flavor="plan",
        model=config,
        parallelize_fn=parallelize_deepseekv3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=DeepSeekV3StateDictAdapter,
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
    return MTPLoss.Config(global_vocab_size=MODEL["vocab"])


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
