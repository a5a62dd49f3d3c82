"""A plan as torchtitan 0.3 arguments and a registry module that builds the model with its exact dimensions.

Version 0.3 reads no TOML: ``--module plan_config --config plan`` names a Python function, and every field is a flag.
"""

from __future__ import annotations

from typing import Any

from planner.backends.torchtitan_rules import LOSS_CHUNKS, SCHEDULE_NAMES, model_module
from planner.errors import InputError
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS, Flag, flag, one_line
from planner.render.topology import Axis, Topology, mesh_degrees
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec, MoeSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy

Constant = tuple[str, str, str]
"""Name, value as Python source, remark."""

_CLASSES = {
    "llama3": ("Llama3Model", "Llama3TransformerBlock", "parallelize_llama", "Llama3StateDictAdapter", "ComplexRoPE"),
    "qwen3": ("Qwen3Model", "Qwen3TransformerBlock", "parallelize_qwen3", "Qwen3StateDictAdapter", "CosSinRoPE"),
    "deepseek_v3": ("DeepSeekV3Model", "", "parallelize_deepseekv3", "DeepSeekV3StateDictAdapter", "ComplexRoPE"),
}
"""Model, block, parallelize function, weight adapter and rotary embedding of a module below torchtitan/models."""

_THETA = {"llama3": 500000.0, "qwen3": 1000000.0, "deepseek_v3": 10000.0}


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for torchtitan."""
    request, strategy = document.request, plan.strategy
    model, job = request.model, request.job
    names = {"title": one_line(model.name), "gpus": strategy.gpus}
    return Bundle(
        files={
            "torchtitan_args.sh": fill("torchtitan/torchtitan_args.sh.j2", {**names, "flags": plan_flags(strategy)}),
            "plan_config.py": fill("torchtitan/plan_config.py.j2", {**names, **config_context(model, job, strategy)}),
        },
        launch=Launch(
            script="-m torchtitan.train",
            arguments='"${TORCHTITAN_ARGS[@]}" "$@"',
            variables=(EXPANDABLE_SEGMENTS,),
            prepare=(
                "# shellcheck source=torchtitan_args.sh",
                "source ./torchtitan_args.sh",
                "# Every process imports plan_config.py.",
                'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
            ),
        ),
        topology=topology(strategy, request.cluster),
        expert_topology=expert_topology(strategy, request.cluster) if model.moe is not None else None,
        files_told={
            "torchtitan_args.sh": "parallelism and batch as torchtitan's flags",
            "plan_config.py": "the model, its loss, its stages and what is recomputed, as a torchtitan configuration",
        },
        setup=setup(strategy),
        watch=WATCH,
        out_of_memory=out_of_memory(job, strategy),
        notes=notes(model, strategy),
    )


WATCH = (
    "`tps` and `mfu` of the log, from the tenth step on, against the estimate; the first steps compile.",
    "`memory: ...GiB` of the log (peak reserved) on the first and the last pipeline rank against the estimated peak; "
    "warnings of `CUDA memory allocation retries` must not appear.",
    "`size: ... total parameters` in the first lines: the parameters of the model that the plan is for.",
    "`loss`: it must fall on real data.",
)


def plan_flags(strategy: Strategy) -> list[Flag]:
    """Every flag that the plan decides."""
    replicate, shard = mesh_degrees(strategy)
    flags = [
        flag("--parallelism.data_parallel_replicate_degree", replicate),
        flag("--parallelism.data_parallel_shard_degree", shard),
        flag("--parallelism.fsdp_reshard_after_forward", "default" if strategy.zero_stage == 3 else "never"),
        flag("--parallelism.tensor_parallel_degree", strategy.tp),
        flag("--parallelism.context_parallel_degree", strategy.cp),
        flag("--parallelism.pipeline_parallel_degree", strategy.pp),
    ]
    if strategy.tp > 1 and not strategy.sequence_parallel:
        flags.append(flag("--parallelism.no-enable_sequence_parallel"))
    if strategy.pp > 1:
        flags += [
            flag("--parallelism.pipeline_parallel_schedule", SCHEDULE_NAMES[strategy.pipeline_schedule]),
            flag("--parallelism.pipeline_parallel_microbatch_size", strategy.micro_batch),
        ]
    if strategy.ep > 1:
        flags.append(flag("--parallelism.expert_parallel_degree", strategy.ep))
    flags += [
        flag("--parallelism.spmd_backend", "partial_dtensor", remark="the default needs a PyTorch newer than 2.13"),
        flag("--training.local_batch_size", local_batch(strategy)),
        flag("--training.global_batch_size", strategy.global_batch),
        flag("--training.seq_len", strategy.seq_len),
        flag("--training.mixed_precision_param", "float32" if strategy.precision == "fp32" else "bfloat16"),
        flag("--training.disable_cuda_graphs", remark="pipelines and the standard expert dispatch refuse them"),
    ]
    if strategy.offload.device == "cpu":
        flags.append(flag("--training.enable_cpu_offload"))
    return flags


def local_batch(strategy: Strategy) -> int:
    """Sequences of one replica and accumulation step; a pipeline splits them into its micro-batches itself."""
    return strategy.micro_batch * (strategy.grad_accum if strategy.pp > 1 else 1)


def config_context(model: ModelSpec, job: Job, strategy: Strategy) -> dict[str, Any]:
    """What ``plan_config.py`` is filled with."""
    family = model_module(model)
    if family is None:
        raise InputError(
            f"torchtitan has no classes for {one_line(model.name)}",
            where="model",
            allowed="models like Llama 2 and 3, Mistral, Qwen3, Mixtral, DeepSeek-V2 and V3",
            hint="choose another framework: `planner backends` lists what each can run",
        )
    names = dict(zip(("model_class", "block_class", "parallelize", "adapter", "rope"), _CLASSES[family], strict=True))
    if family == "qwen3" and model.qk_norm == "none":
        # Its adapter expects the names of the norms on queries and keys.
        names["adapter"] = ""
    balanced = model.moe is not None and model.moe.expert_bias
    return {
        **names,
        "family": family,
        "moe": model.moe is not None,
        "mtp": model.mtp_layers > 0,
        "theta": _THETA[family],
        "scores": "sigmoid" if balanced else "softmax",
        "router_norm": str(balanced or family == "qwen3"),
        "constants": constants(model, job, strategy),
    }


def constants(model: ModelSpec, job: Job, strategy: Strategy) -> list[Constant]:
    """The plan's own values at the top of ``plan_config.py``, as plain literals."""
    stages = repr(strategy.layers_per_stage) if strategy.pp > 1 else "None"
    whole_loss = job.loss == "eager" or model.mtp_layers > 0
    return [
        ("MODEL", _literal(dimensions(model, strategy.seq_len)), ""),
        ("RECOMPUTE", f'"{strategy.recompute.mode}"', "none, selective (every second matrix product is kept) or full"),
        ("FLOAT8", str(strategy.precision == "fp8"), "linear layers multiply in fp8, scaled row by row"),
        (
            "LOSS_CHUNKS",
            "1" if whole_loss else str(LOSS_CHUNKS),
            "pieces of a sequence; one has logits at a time",
        ),
        ("LAYERS_PER_STAGE", stages, "of the pipeline stages in model order; None: no pipeline"),
    ]


def _literal(values: dict[str, int | bool]) -> str:
    inside = "".join(f'    "{name}": {value!r},\n' for name, value in values.items())
    return f"{{\n{inside}}}"


def dimensions(model: ModelSpec, seq_len: int) -> dict[str, int | bool]:
    """The architecture in our words; rotary tables reach as far as the sequences."""
    values: dict[str, int | bool] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "vocab": model.vocab,
        "tied": model.tied,
        "max_seq": max(model.max_seq, seq_len),
    }
    if model.mla is None:
        values |= {
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "qk_norm": model.qk_norm == "per_head",
        }
    else:
        values |= model.mla.model_dump()
    if model.moe is not None:
        values |= _expert_dimensions(model.moe)
    return values | ({"mtp_layers": model.mtp_layers} if model.mtp_layers else {})


def _expert_dimensions(moe: MoeSpec) -> dict[str, int | bool]:
    names = ("experts", "top_k", "expert_ffn", "shared_ffn", "dense_first", "every", "offset", "expert_bias")
    return {name: getattr(moe, name) for name in names}


def topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """Rank order of the dense mesh (ParallelDims.build_mesh): tensor, context, shard, replica, pipeline."""
    replicate, shard = mesh_degrees(strategy)
    return Topology(
        (
            Axis("tp", strategy.tp, "one layer's matrices"),
            Axis("cp", strategy.cp, "one sequence"),
            Axis("dp_shard", shard, "weights, gradients and optimizer states", over="cp"),
            Axis("dp_replicate", replicate, "gradients, summed over the copies"),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def expert_topology(strategy: Strategy, cluster: Cluster) -> Topology | None:
    """Rank order of the expert mesh; without expert parallelism experts live on the dense one."""
    if strategy.ep == 1:
        return None
    replicate, _ = mesh_degrees(strategy)
    return Topology(
        (
            Axis("ep", strategy.ep, "the experts of one layer"),
            Axis("efsdp", strategy.shard_degree * strategy.tp // strategy.ep, "weights and states of each expert"),
            Axis("dp_replicate", replicate, "gradients, summed over the copies"),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def setup(strategy: Strategy) -> tuple[str, ...]:
    """What has to be there before the first run."""
    extra = " and torchao" if strategy.precision == "fp8" else ""
    return (
        f"Install torchtitan 0.3 (`pip install torchtitan==0.3.0`) with the PyTorch it asks for, or 2.13{extra}, on "
        "every node.",
        "Set `HF_ASSETS` to a folder with the model's tokenizer; its vocabulary must not exceed the `vocab` of "
        "`plan_config.py`. `DATASET` is a data set that torchtitan knows (default: c4, streamed from Hugging Face).",
        "To check the arguments without GPUs: `python -m torchtitan.config.manager` with the words of "
        "`torchtitan_args.sh` prints the whole configuration.",
    )


def notes(model: ModelSpec, strategy: Strategy) -> tuple[str, ...]:
    """What the files leave open, and what the plan counts on."""
    texts = [
        "`ROPE_THETA`, rotary scaling and the learning rate in `plan_config.py` are placeholders: take them from the "
        "model's release. They change the trained function, not its cost.",
        "CUDA graphs, which torchtitan 0.3 switches on by default, are off: the estimate counts kernel launches one "
        "by one. Without pipeline and expert parallelism they can be tried by removing "
        "`--training.disable_cuda_graphs`.",
    ]
    if model.moe is not None:
        texts.append(
            "Routing details (`ROUTER_SCORES`, `ROUTER_NORM`, group limits) are placeholders too; load is balanced by "
            "torchtitan's expert bias."
        )
    if model_module(model) == "qwen3" and model.qk_norm == "none":
        texts.append(
            "torchtitan has no adapter for released weights of this model: it trains from scratch or from its own "
            "checkpoints."
        )
    if strategy.pp > 1:
        texts.append(
            "A pipeline keeps the gathered weights and unsharded gradients of its stages for the whole step; the "
            "memory estimate counts both."
        )
    return tuple(texts)


def out_of_memory(job: Job, strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first."""
    advice = []
    if strategy.micro_batch > 1 and strategy.pp == 1:
        advice.append(
            f"Halve `--training.local_batch_size` ({strategy.micro_batch}); the global batch stays as it is and "
            "gradients accumulate over more steps."
        )
    elif strategy.micro_batch > 1:
        advice.append(f"Halve `--parallelism.pipeline_parallel_microbatch_size` ({strategy.micro_batch}).")
    if job.loss == "eager":
        advice.append("Make a plan with `--loss chunked` where the model has no prediction blocks.")
    stronger = {"none": '`RECOMPUTE = "selective"`, then `"full"`', "selective": '`RECOMPUTE = "full"`'}
    if strategy.recompute.mode in stronger:
        advice.append(f"In `plan_config.py`: {stronger[strategy.recompute.mode]}.")
    if strategy.zero_stage < 3 and strategy.shard_degree > 1:
        advice.append("`--parallelism.fsdp_reshard_after_forward default`: the gathered weights are freed.")
    if mesh_degrees(strategy)[0] > 1:
        advice.append(
            "Shard over more ranks: raise `--parallelism.data_parallel_shard_degree` and lower "
            "`--parallelism.data_parallel_replicate_degree`."
        )
    if strategy.offload.device == "none" and strategy.zero_stage >= 2:
        advice.append("`--training.enable_cpu_offload` (slow: the optimizer runs on the host).")
    advice.append("Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`.")
    return tuple(advice)
