"""Megatron-LM through accelerate's plugin, whose defaults are neither Megatron-LM's nor a plan's.

Where a default of the plugin costs speed or memory it is told."""

from __future__ import annotations

from planner.reading.configuration import Configuration, StatedStrategy
from planner.reading.huggingface.launch import Machines
from planner.reading.huggingface.strategies import settled_precision
from planner.reading.huggingface.training_arguments import TrainerSays
from planner.reading.huggingface.values import Section
from planner.specs.job import Precision
from planner.specs.strategy import Offload, Recompute, Schedule


def with_megatron(
    top: Section, says: TrainerSays | None, machines: Machines, stated: Precision | None
) -> Configuration:
    """Megatron-LM through accelerate's plugin, whose defaults are its own."""
    config = top.section("megatron_lm_config")

    def size(name: str, default: int) -> int:
        return config.count(f"megatron_lm_{name}", default) or default

    tp, pp = size("tp_degree", 1), size("pp_degree", 1)
    if "megatron_lm_context_parallel_size" not in config:
        config.add(
            "megatron-context-default",
            "warning",
            "without megatron_lm_context_parallel_size accelerate asks Megatron for context parallelism of 2",
            "megatron_lm_context_parallel_size",
            hint="write megatron_lm_context_parallel_size: 1",
        )
    cp = size("context_parallel_size", 2)
    world = tp * pp * cp
    gpus = machines.gpus
    if gpus is not None and gpus % world:
        config.notes.add(
            "world-size",
            "error",
            f"num_processes({gpus}) % (tp({tp}) * pp({pp}) * cp({cp})) = {gpus % world}",
            "megatron_lm_config",
        )
    dp = gpus // world if gpus is not None and gpus % world == 0 else None
    sharded = bool(config.truth("megatron_lm_use_distributed_optimizer", False))
    accumulated = size("num_micro_batches", 1)
    plain: Schedule = "none" if pp == 1 else "1f1b"
    strategy = StatedStrategy(
        tp=tp,
        sequence_parallel=tp > 1 and bool(config.truth("megatron_lm_sequence_parallelism", False)),
        cp=cp,
        pp=pp,
        vpp=1,
        pipeline_schedule=plain,
        ep=size("expert_model_parallel_size", 1),
        etp=size("expert_tensor_parallel_size", 1),
        dp=dp,
        zero_stage=1 if sharded else 0,
        shard_degree=1 if not sharded else None if dp is None else dp * cp,
        micro_batch=says.micro_batch if says is not None else None,
        grad_accum=accumulated,
        recompute=_megatron_recompute(config),
        offload=Offload(optimizer=1.0, device="cpu")
        if config.truth("megatron_lm_optimizer_cpu_offload", False)
        else Offload(),
    )
    micro = strategy.micro_batch
    return Configuration(
        format="accelerate with Megatron-LM",
        backend="megatron",
        gpus=gpus,
        gpus_per_node=machines.gpus_per_node,
        global_batch=micro * accumulated * dp if micro and dp else None,
        precision=settled_precision(top, says, stated),
        strategy=strategy,
    )


def _megatron_recompute(config: Section) -> Recompute | None:
    """The plugin asks for full recomputation of every layer unless told otherwise."""
    if config.truth("megatron_lm_recompute_activations", False):
        config.add(
            "ignored-key",
            "warning",
            "accelerate reads megatron_lm_recompute_activations and gives it to nobody",
            "megatron_lm_recompute_activations",
            hint="megatron_lm_recompute_granularity: selective is what it means in Megatron-LM",
        )
    granularity = (config.word("megatron_lm_recompute_granularity") or "full").lower()
    if granularity == "selective":
        return Recompute(mode="selective", modules=("core_attn",))
    if granularity in ("none", "null"):
        return Recompute()
    method = (config.word("megatron_lm_recompute_method") or "uniform").lower()
    if granularity != "full" or method != "uniform":
        config.notes.skip(f"megatron_lm_recompute_granularity: {granularity}, method {method}")
        return None
    if "megatron_lm_recompute_granularity" not in config:
        config.add(
            "megatron-recompute-default",
            "note",
            "accelerate asks Megatron for full recomputation where nothing is said",
            "megatron_lm_recompute_granularity",
        )
    return Recompute(mode="full")
