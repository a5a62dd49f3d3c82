"""Why a strategy does not fit, in the terms that bind, and on how few machines of the same kind it would.

Reads the memory tree of the estimate; says whether the GPU or the host is short, in which phase, by what, and which
levers cannot help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.cost.context import HOST_MEMORY_SHARE, CostContext
from planner.cost.estimate import estimate as cost_estimate
from planner.cost.evaluate import evaluate
from planner.cost.params import total_params
from planner.search.legality import refusals
from planner.service.clusters import with_gpus
from planner.specs.batch import StrategyBatch
from planner.specs.convert import from_strategy
from planner.specs.finding import Finding
from planner.specs.plan import Breakdown, Estimate, Plan
from planner.specs.strategy import Strategy
from planner.units import counted, gib

ABOUT_FIT = ("gpu-memory", "host-memory", "load-memory")
"""Ids of the findings that say what does not fit; a configuration can be legal and have them."""
STATES = ("weights", "gradients", "optimizer")
WHEN = {"forward and backward": "in forward and backward pass", "optimizer step": "in the optimizer step"}
SMALL_PART = 0.01
"""Parts below this share of the peak are told together."""
MOST_NODES = 64
"""Nodes that are added at most; a configuration that needs more is helped by other settings first."""


def misfit(context: CostContext, plan: Plan) -> list[Finding]:
    """Findings that say what is short; none where the plan fits."""
    return [*_gpu(context, plan), *_host(context, plan)]


def sentences(context: CostContext, plan: Plan) -> tuple[str, ...]:
    """The same as sentences, for documents that have no findings."""
    return tuple(
        " ".join(part for part in (f"{each.message}.", f"{each.got}.", f"{each.hint}.") if part != ".")
        for each in misfit(context, plan)
    )


@dataclass(frozen=True)
class Peak:
    """The fullest stage in its worst phase."""

    stage: str
    phase: str
    parts: tuple[Breakdown, ...]
    other_phase: float
    """Bytes of the stage's other phase; 0 where there is none."""

    @property
    def states(self) -> float:
        return sum(part.value for part in self.parts if part.name in STATES)

    @property
    def rest(self) -> dict[str, float]:
        """Everything else by name."""
        return {part.name: part.value for part in self.parts if part.name not in STATES and part.value > 0}


def peak_of(estimate: Estimate) -> Peak:
    """Where and when the estimate's memory is largest."""
    tree = estimate.memory
    stages = tree.children if tree.combine == "max" and tree.children else (tree,)
    stage = max(stages, key=lambda each: each.value)
    phases = stage.children if stage.combine == "max" and stage.children else (stage,)
    phase = max(phases, key=lambda each: each.value)
    others = [each.value for each in phases if each is not phase]
    return Peak(stage.name, phase.name, phase.children or (phase,), max(others, default=0.0))


def _gpu(context: CostContext, plan: Plan) -> Iterator[Finding]:
    estimate, limit = plan.estimate, plan.estimate.memory_limit_bytes
    upper = estimate.peak_memory_range_bytes[1]
    if upper <= limit:
        return
    peak = peak_of(estimate)
    where = f" on {peak.stage}" if plan.strategy.pp > 1 else ""
    if estimate.peak_memory_bytes > limit:
        needed = f"{gib(estimate.peak_memory_bytes)} needed{where} {WHEN.get(peak.phase, '')}"
        message = f"GPU memory: {needed}, {gib(limit)} there"
    else:
        message = (
            f"GPU memory: {gib(estimate.peak_memory_bytes)} expected{where}, but such runs need up to {gib(upper)}, "
            f"and {gib(limit)} are there: too close to rely on"
        )
    yield Finding(
        id="gpu-memory",
        severity="error",
        message=message,
        got=_parts(peak),
        hint="; ".join(_levers(context, plan, peak)),
    )


def _parts(peak: Peak) -> str:
    """The sum as people check it: states first, then the rest by size, small parts together."""
    least = SMALL_PART * sum(part.value for part in peak.parts)
    states = [(part.name, part.value) for part in peak.parts if part.name in STATES and part.value > 0]
    rest = sorted(peak.rest.items(), key=lambda item: -item[1])
    told = [*states, *(item for item in rest if item[1] >= least)]
    small = sum(value for _, value in rest if value < least)
    if small > 0:
        told.append(("other", small))
    return " + ".join(f"{name} {gib(value)}" for name, value in told)


def _levers(context: CostContext, plan: Plan, peak: Peak) -> Iterator[str]:
    """What can help and what cannot, by the part that is largest."""
    s, limit = plan.strategy, plan.estimate.memory_limit_bytes
    if peak.phase == "optimizer step" and 0 < peak.other_phase * context.memory_upper <= limit:
        yield "forward and backward pass fit, the crash comes in the first optimizer step"
    if peak.states > limit:
        yield (
            f"weights, gradients and optimizer alone take {gib(peak.states)}: no micro-batch, sequence length or "
            f"recomputation helps; {_about_states(context, s)}"
        )
        return
    logits = peak.rest.get("logits and loss", 0.0)
    activations = peak.rest.get("activations", 0.0)
    short = plan.estimate.peak_memory_range_bytes[1] - limit
    if peak.states >= activations + logits:
        yield _about_states(context, s)
        if s.recompute.mode != "full" and activations > short:
            yield f"or recompute: activations take {gib(activations)}"
    elif logits >= activations:
        yield "a chunked or fused cross entropy, a smaller micro-batch or shorter sequences shrink the logits"
    else:
        levers = ["a smaller micro-batch"] if s.micro_batch > 1 else ["shorter sequences or context parallelism"]
        levers = [*(["recomputation"] if s.recompute.mode != "full" else []), *levers]
        if s.tp > 1 and not s.sequence_parallel and True in context.backend.sequence_parallel_choices:
            levers = ["sequence parallelism", *levers]
        yield f"activations are the largest part: {', '.join(levers)}; more GPUs shard the states only"


def _about_states(context: CostContext, s: Strategy) -> str:
    """What makes weights, gradients and optimizer smaller, as far as the framework can: further sharding, offload."""
    shards = {1: "the optimizer", 2: "the gradients", 3: "the weights"}
    last = max((stage for stage in context.backend.zero_stages if _can_shard(context, s, stage)), default=s.zero_stage)
    further = [shards[stage] for stage in range(s.zero_stage + 1, last + 1)]
    levers = [f"shard {' and '.join(further)}, too (ZeRO {last})"] if further else []
    if s.offload.device == "none" and any(s.zero_stage in choice.zero_stages for choice in context.backend.offloads):
        levers.append("offload the optimizer")
    more = "take more GPUs" if s.zero_stage else "split the model over more GPUs (tp or pp)"
    return ", ".join([*levers, f"or {more}"]) if levers else more


def _can_shard(context: CostContext, s: Strategy, stage: int) -> bool:
    """Whether a higher stage shards something here and the framework takes it with these degrees."""
    if stage <= s.zero_stage or s.dp * s.cp == 1:
        return False
    degrees = context.backend.shard_degrees(context.cluster, s.tp, s.cp, s.dp, stage)
    changed = s.model_copy(update={"zero_stage": stage, "shard_degree": degrees[0], "secondary_shard_degree": None})
    return not refusals(context, from_strategy(changed, context.recompute_kinds))


def _host(context: CostContext, plan: Plan) -> Iterator[Finding]:
    needed, limit = plan.estimate.host_memory_bytes_per_node, context.host_memory_limit_bytes
    if needed <= limit:
        return
    nodes = context.cluster.nodes
    yield Finding(
        id="host-memory",
        severity="error",
        message=f"host memory: {gib(needed)} needed on every node, {gib(limit)} usable of "
        f"{gib(context.cluster.host_memory_bytes_per_node)}: the kernel kills the processes (exit code -9, no CUDA "
        "error)",
        got=f"{gib(needed * nodes)} of offloaded states and buffers over {counted(nodes, 'node')}",
        allowed=f"nodes of at least {gib(needed / HOST_MEMORY_SHARE)}",
        hint="offload less (the optimizer only, or a share of it), use more nodes, an 8-bit optimizer or LoRA; neither "
        "batch nor sequence length changes it",
    )


def loading(context: CostContext) -> list[Finding]:
    """What is short on the host where every process reads the whole model, in 16 bits at least."""
    ranks, copy = context.cluster.local_gpus, LOADED_BYTES * total_params(context.model)
    if ranks * copy <= context.host_memory_limit_bytes:
        return []
    return [
        Finding(
            id="load-memory",
            severity="error",
            message=f"host memory while loading: every process reads the whole model, {gib(ranks * copy)} on a node, "
            f"{gib(context.host_memory_limit_bytes)} usable of {gib(context.cluster.host_memory_bytes_per_node)}: the "
            "kernel kills them (exit code -9, no CUDA error)",
            got=f"{ranks} * {gib(copy)} in 16 bits",
            hint="let one process load, or each its part: fsdp_cpu_ram_efficient_loading: true with FSDP, "
            "zero3_init_flag: true with ZeRO-3",
        )
    ]


LOADED_BYTES = 2
"""A parameter as checkpoints hold it; loaders that go over fp32 need twice that."""


@dataclass(frozen=True)
class Enough:
    """Machines on which the same settings fit."""

    gpus: int
    nodes: int
    global_batch: int
    """The stated one where it divides over the replicas; else that of the same accumulation."""
    estimate: Estimate


def fewest_gpus(context: CostContext, strategy: Strategy) -> Enough | None:
    """The smallest number of GPUs, in whole nodes (or part of one), on which the same degrees, micro-batch, sharding
    and offload fit with more replicas; None where no number up to MOST_NODES more nodes does."""
    for gpus in _counts(context, strategy.tp * strategy.cp * strategy.pp):
        there, row = _with_replicas(context, strategy, gpus)
        if not refusals(there, row) and bool(evaluate(there, row).fits[0]):
            return Enough(gpus, there.cluster.nodes, there.job.global_batch, cost_estimate(there, row))
    return None


def _with_replicas(context: CostContext, s: Strategy, gpus: int) -> tuple[CostContext, StrategyBatch]:
    """The same settings on more machines: replicas fill them, and states that were sharded over all replicas still
    are."""
    dp = gpus // (s.tp * s.cp * s.pp)
    cluster = with_gpus(context.cluster, gpus)
    total = context.job.global_batch
    batch = total if total % (s.micro_batch * dp) == 0 else s.micro_batch * s.grad_accum * dp
    there = replace(context, cluster=cluster, job=context.job.model_copy(update={"global_batch": batch}))
    degrees = there.backend.shard_degrees(cluster, s.tp, s.cp, dp, s.zero_stage) or (1,)
    kept = s.shard_degree in degrees and s.shard_degree != s.dp * s.cp
    changed = s.model_copy(update={"dp": dp, "shard_degree": s.shard_degree if kept else degrees[0]})
    return there, from_strategy(changed, there.recompute_kinds)


def _counts(context: CostContext, model_ranks: int) -> Iterator[int]:
    """Larger numbers of GPUs, rising: doublings inside a node, then whole nodes."""
    cluster = context.cluster
    gpus, node = cluster.gpus, cluster.gpus_per_node
    while gpus * 2 <= node:
        gpus *= 2
        if gpus % model_ranks == 0:
            yield gpus
    first = cluster.gpus // node + 1
    for nodes in range(max(first, 1), max(first, 1) + MOST_NODES):
        if nodes * node > gpus and nodes * node % model_ranks == 0:
            yield nodes * node
