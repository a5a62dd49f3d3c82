"""A plan as Megatron-LM arguments: parallel layout, recomputation, optimizer, precision, and launch variables.

Flags of megatron-core 0.16 and newer (``pretrain_gpt.py``); the architecture part is in ``megatron_model``.
"""

from __future__ import annotations

import numpy as np

from planner.backends.megatron import dispatches_once_per_domain, overlaps_tensor_parallel
from planner.backends.megatron_rules import FROM_BLACKWELL
from planner.errors import InputError
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.megatron_model import model_flags, model_notes
from planner.render.text import EXPANDABLE_SEGMENTS, Flag, Variable, flag, one_line
from planner.render.topology import Axis, Topology, replica_ranks, replicas_share
from planner.specs.cluster import Accelerator, Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for Megatron-LM."""
    request, strategy = document.request, plan.strategy
    accelerator = request.cluster.accelerator
    arguments = {
        "title": one_line(request.model.name),
        "gpus": strategy.gpus,
        "model_flags": model_flags(request.model, strategy.seq_len),
        "parallel_flags": parallel_flags(request.model, strategy, request.cluster),
        "train_flags": [
            *batch_flags(strategy),
            *precision_flags(strategy, accelerator),
            *optimizer_flags(strategy),
            *kernel_flags(request.job, request.model),
        ],
        "vocab": request.model.vocab,
    }
    return Bundle(
        files={"megatron_args.sh": fill("megatron/megatron_args.sh.j2", arguments)},
        launch=Launch(
            script='"${MEGATRON_PATH:?set MEGATRON_PATH to a checkout of Megatron-LM}/pretrain_gpt.py"',
            arguments='"${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${DATA_ARGS[@]}" "$@"',
            prepare=("# shellcheck source=megatron_args.sh", "source ./megatron_args.sh"),
            variables=environment(strategy, accelerator),
        ),
        topology=replica_ranks(strategy, request.cluster),
        expert_topology=expert_topology(strategy, request.cluster) if request.model.moe is not None else None,
        notes=tuple(model_notes(request.model)),
        files_told={"megatron_args.sh": "every Megatron-LM argument, in four arrays"},
        setup=setup(request.cluster, strategy),
        watch=WATCH,
        out_of_memory=out_of_memory(request.model, strategy),
    )


def setup(cluster: Cluster, strategy: Strategy) -> tuple[str, ...]:
    """What has to be there before the first run."""
    accelerator = cluster.accelerator
    image = "AMD's ROCm training image" if accelerator.vendor.lower() == "amd" else "NVIDIA's PyTorch container"
    needed = (
        f"Install Megatron-LM (megatron-core 0.16 or newer with Transformer Engine) on every node, for example {image} "
        "plus a checkout of the repository, and set `MEGATRON_PATH` to that checkout.",
        "Nothing else is needed for the first run: without `DATA_PATH` the script trains on mock data.",
    )
    if not dispatches_once_per_domain(cluster, strategy.ep, strategy.etp):
        return needed
    return (
        *needed,
        "Install DeepEP (deep_ep) on every node: experts span nodes, and the plan counts on its dispatcher. Without it "
        "set `--moe-token-dispatcher-type alltoall`, which sends every copy of a token over the network by itself.",
    )


WATCH = (
    "`elapsed time per iteration (ms)` of the log, from the tenth iteration on, against the estimate.",
    "`throughput per GPU (TFLOP/s/GPU)`: Megatron counts its own FLOPs, so compare its trend, not its value.",
    "The memory report after the first iteration: `max allocated` and `max reserved` of the first and the last "
    "pipeline rank.",
    "`lm loss` falling on real data (on mock data it only has to be finite) and `number of nan iterations: 0`.",
)


def parallel_flags(model: ModelSpec, strategy: Strategy, cluster: Cluster) -> list[Flag]:
    """Degrees of parallelism, stage layout, sharding of the optimizer and recomputation."""
    flags = [flag("--tensor-model-parallel-size", strategy.tp)]
    if strategy.tp > 1 and strategy.sequence_parallel:
        flags.append(flag("--sequence-parallel"))
        if overlaps_tensor_parallel(cluster, np.array(strategy.tp), np.array(strategy.sequence_parallel)):
            flags.append(flag("--tp-comm-overlap"))
    if strategy.cp > 1:
        flags += [flag("--context-parallel-size", strategy.cp), flag("--cp-comm-type", "p2p")]
    flags += [flag("--pipeline-model-parallel-size", strategy.pp), *layout_flags(model, strategy)]
    if model.moe is not None:
        # Megatron's default for the second is tp, which multiplies the ranks that experts need.
        flags += [
            flag("--expert-model-parallel-size", strategy.ep),
            flag("--expert-tensor-parallel-size", strategy.etp),
            *dispatcher_flags(cluster, strategy),
        ]
    return flags + sharding_flags(strategy) + recompute_flags(strategy)


def dispatcher_flags(cluster: Cluster, strategy: Strategy) -> list[Flag]:
    """How tokens reach their experts: one copy to each node where expert groups span nodes, else copy by copy."""
    if not dispatches_once_per_domain(cluster, strategy.ep, strategy.etp):
        return [flag("--moe-token-dispatcher-type", "alltoall")]
    return [
        flag("--moe-token-dispatcher-type", "flex", remark="needs the DeepEP package"),
        flag("--moe-flex-dispatcher-backend", "deepep"),
    ]


def layout_flags(model: ModelSpec, strategy: Strategy) -> list[Flag]:
    """How layers are dealt to virtual stages: nothing for one stage, a count when equal, else a layout string."""
    layers = strategy.layers_per_stage
    stages = strategy.pp * strategy.vpp
    if stages == 1:
        return []
    if layers and len(layers) != stages:
        raise InputError(
            f"layers_per_stage has {len(layers)} entries, but pp({strategy.pp}) * vpp({strategy.vpp}) = {stages}",
            where="strategy.layers_per_stage",
        )
    if layers and len(set(layers)) > 1:
        return [flag("--pipeline-model-parallel-layout", layout_string(layers, model.mtp_layers))]
    return [flag("--num-virtual-stages-per-pipeline-rank", strategy.vpp)] if strategy.vpp > 1 else []


def layout_string(layers: tuple[int, ...], mtp_layers: int) -> str:
    """Megatron's layout: E embedding, t a layer, m a multi-token-prediction block, L loss; ``|`` ends a stage."""
    stages = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in layers]
    stages[0] = "E" + stages[0]
    tail = "" if mtp_layers == 0 else "m" if mtp_layers == 1 else f"m*{mtp_layers}"
    stages[-1] += tail + "L"
    return "|".join(stages)


def sharding_flags(strategy: Strategy) -> list[Flag]:
    """The distributed optimizer and what it overlaps."""
    if strategy.zero_stage == 0:
        return [flag("--overlap-grad-reduce")] if strategy.dp * strategy.cp > 1 else []
    flags = [
        flag("--use-distributed-optimizer"),
        flag("--overlap-grad-reduce"),
        flag("--overlap-param-gather"),
    ]
    instances = strategy.dp * strategy.cp // strategy.shard_degree
    if instances > 1:
        flags.append(flag("--num-distributed-optimizer-instances", instances))
    return flags


def recompute_flags(strategy: Strategy) -> list[Flag]:
    """Selective modules, or full recomputation of the first N layers of every virtual stage."""
    recompute = strategy.recompute
    if recompute.mode == "none":
        return []
    if recompute.mode == "selective":
        return [
            flag("--recompute-granularity", "selective"),
            flag("--recompute-modules", *(recompute.modules or ("core_attn",))),
        ]
    flags = [flag("--recompute-granularity", "full")]
    counts = recompute.layers_per_stage
    if counts is None or counts == strategy.layers_per_stage:
        return [*flags, flag("--recompute-method", "uniform"), flag("--recompute-num-layers", 1)]
    number = max(counts)
    layers = strategy.layers_per_stage or counts
    if len(layers) != len(counts) or any(c != min(number, have) for c, have in zip(counts, layers, strict=True)):
        raise InputError(
            f"Megatron recomputes the same number of layers in every virtual stage, not {list(counts)}",
            where="strategy.recompute.layers_per_stage",
            allowed=f"min(N, layers of the stage) for one N; the stages have {list(layers)} layers",
        )
    return [*flags, flag("--recompute-method", "block"), flag("--recompute-num-layers", number)]


def batch_flags(strategy: Strategy) -> list[Flag]:
    """Micro-batch and global batch; the number of micro-batches follows from them."""
    return [
        flag("--micro-batch-size", strategy.micro_batch),
        flag("--global-batch-size", strategy.global_batch, remark=f"{strategy.grad_accum} micro-batches a step"),
    ]


def precision_flags(strategy: Strategy, accelerator: Accelerator) -> list[Flag]:
    """Number formats; fp8 takes the scaling recipe that the architecture runs in hardware."""
    if strategy.precision == "fp32":
        return []
    if strategy.precision == "fp16":
        return [flag("--fp16")]
    flags = [flag("--bf16")]
    if strategy.precision == "nvfp4":
        flags += [flag("--fp4-format", "e2m1"), flag("--fp4-recipe", "nvfp4", remark="Transformer Engine 2.7 or newer")]
    if strategy.precision == "fp8":
        if accelerator.architecture.lower() in FROM_BLACKWELL:
            flags += [flag("--fp8-format", "e4m3"), flag("--fp8-recipe", "mxfp8", remark="block scaling in hardware")]
        else:
            flags += [flag("--fp8-format", "hybrid"), flag("--fp8-recipe", "tensorwise", remark="current scaling")]
    return flags


def optimizer_flags(strategy: Strategy) -> list[Flag]:
    """Offload of the optimizer: it goes through the precision-aware optimizer, whose states stay fp32 here."""
    if strategy.offload.optimizer == 0:
        return []
    return [
        flag("--use-precision-aware-optimizer", remark="the offload needs it; its states stay fp32"),
        flag("--optimizer-cpu-offload"),
        flag("--optimizer-offload-fraction", f"{strategy.offload.optimizer:g}"),
        flag("--overlap-cpu-optimizer-d2h-h2d"),
    ]


def kernel_flags(job: Job, model: ModelSpec) -> list[Flag]:
    """Implementations that the estimate assumes."""
    flags = [
        flag("--transformer-impl", "transformer_engine"),
        flag("--attention-backend", "auto" if job.flash_attention else "unfused"),
        flag("--no-create-attention-mask-in-dataloader", remark="a mask is seq x seq bytes for every sample"),
    ]
    if job.loss != "eager":
        flags += [flag("--cross-entropy-loss-fusion"), flag("--cross-entropy-fusion-impl", "native")]
    if model.moe is not None:
        flags.append(flag("--moe-permute-fusion"))
    return flags


def environment(strategy: Strategy, accelerator: Accelerator) -> tuple[Variable, ...]:
    """Variables of the launch script, each with its reason."""
    variables = []
    if (strategy.tp > 1 or strategy.cp > 1) and accelerator.architecture.lower() not in FROM_BLACKWELL:
        variables.append(
            Variable(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                "One hardware queue keeps communication ahead of the matrix multiplications it hides behind; "
                "Megatron refuses to "
                "start without it when tp or cp > 1 before Blackwell.",
            )
        )
    return (*variables, EXPANDABLE_SEGMENTS)


def expert_topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """The second grid that Megatron lays over the same ranks for the experts."""
    edp = strategy.gpus // (strategy.etp * strategy.ep * strategy.pp)
    return Topology(
        (
            Axis("etp", strategy.etp, "one expert's matrices"),
            Axis("ep", strategy.ep, "tokens, by all-to-all"),
            Axis("edp", edp, replicas_share(strategy, edp, " of the experts")),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def out_of_memory(model: ModelSpec, strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first."""
    advice = []
    if strategy.micro_batch > 1:
        advice.append(f"Halve `--micro-batch-size` ({strategy.micro_batch}); the global batch stays as it is.")
    if strategy.recompute.mode == "none":
        modules = "mlp" if model.moe is None else "layernorm moe_act"
        advice.append(f"Add `--recompute-granularity selective --recompute-modules {modules}`.")
    if strategy.recompute.mode != "full":
        advice.append(
            "Recompute some layers fully: `--recompute-granularity full --recompute-method block "
            "--recompute-num-layers 1`, then more."
        )
    elif strategy.recompute.layers_per_stage is not None:
        advice.append("Raise `--recompute-num-layers`.")
    if strategy.tp > 1 and not strategy.sequence_parallel:
        advice.append("Add `--sequence-parallel`.")
    if model.moe is not None:
        advice.append(
            "Uneven routing early in training makes some ranks peak; leave 10 % headroom or raise expert parallelism."
        )
    if strategy.offload.optimizer < 1:
        advice.append(
            "Offload the optimizer: `--use-precision-aware-optimizer --optimizer-cpu-offload "
            "--optimizer-offload-fraction 0.5`."
        )
    advice.append("Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`.")
    return tuple(advice)
