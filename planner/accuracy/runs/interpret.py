"""Turns a measured run into a question for the cost model, from its model, hardware and run fields only.

What the source leaves open is filled by one rule each, listed in ``Case.assumed``: degrees default to 1, sequence
parallelism goes with tensor parallelism, and where several settings are possible (recomputation, micro-batch, chunks)
the case carries all of them and the fastest that fits is taken, because published runs are tuned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from planner.accuracy.runs.architecture import model_of
from planner.accuracy.runs.machines import cluster_of
from planner.accuracy.runs.memory_layout import optimizer_instances
from planner.accuracy.runs.settings import Recomputation, host_states_of, precision_of, recomputations_of, tuned
from planner.accuracy.runs.skip import Skip
from planner.accuracy.runs.stack import packed, stack_of
from planner.backends.base import Backend
from planner.cost.context import CostContext
from planner.specs.batch import SCHEDULES, StrategyBatch
from planner.specs.job import LORA_RANK, Job, Task
from planner.specs.measurement import MeasuredConfiguration, MeasuredRun, MemoryKind
from planner.specs.model import ModelSpec
from planner.specs.numbers import degree

LARGEST_MICRO_BATCH = 8
"""Micro-batches tried where a source states none: 1, 2, 4, 8.  With a pipeline it is 1, as in 331 of the 367 public
Megatron runs that state both."""
TUNED_LORA_RANK = 16
"""NVIDIA's performance recipes give adapters of this rank to query, key and value only (NVIDIA-NeMo/Megatron-Bridge,
scripts/performance/configs/llama; NeMo the same); its other runs follow the library's defaults."""
PACKED_SAMPLE_TOKENS = 170
"""Tokens of a question, its context and its answer in SQuAD, the default set of NVIDIA's fine-tuning recipes, where a
record says that samples are packed but not how long they are."""
_EMPTY_ENDS = 2
"""Chunks that can hold no layer: Megatron counts embedding and loss as layers of the split if asked to
(--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split)."""
_SCHEDULES = {
    "gpipe": "gpipe",
    "afab": "gpipe",
    "zb-h1": "zb-h1",
    "zb-1p": "zb-h1",
    "zb-h2": "zb-h2",
    "zb-2p": "zb-h2",
}
"""Schedules by the names that sources use; everything else is 1F1B, interleaved where there are several chunks."""


@dataclass(frozen=True)
class Case:
    """One record as the cost model sees it."""

    run: MeasuredRun
    context: CostContext
    batch: StrategyBatch
    """One row for each setting that the source leaves open."""
    assumed: tuple[str, ...]
    memory_kind: MemoryKind
    memory_rank: str
    """Which rank the figure is of: worst, first, last."""
    known_stack: bool
    """Whether the framework is one of those that were measured; others are priced as the default stack."""
    timed: bool
    """Whether the record states a whole step (global batch known)."""


@dataclass
class _Degrees:
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    assumed: list[str] = field(default_factory=list)


def interpret(run: MeasuredRun) -> Case:
    """The case of a record; raises Skip with the reason where it cannot be priced."""
    model, assumed = model_of(run.model)
    cluster = cluster_of(run.hardware)
    precision, said = precision_of(run.run, cluster)
    stack, known = stack_of(run, cluster, precision)
    assumed = assumed + said
    degrees = _degrees(run.run, model, cluster.gpus, cluster.ranks_per_domain)
    timed = run.run.global_batch is not None
    recipe = stack.name == "megatron" and tuned(run.run)
    global_batch = run.run.global_batch or degrees.dp * (run.run.micro_batch or 1) * max(degrees.pp, 1)
    job = Job(
        seq_len=run.model.seq_len or model.max_seq,
        global_batch=global_batch,
        sample_tokens=PACKED_SAMPLE_TOKENS if packed(run.run) else None,
        precision=precision,
        task=_task(run),
        lora_rank=TUNED_LORA_RANK if recipe else LORA_RANK,
        lora_targets="qkv" if recipe else "all",
        flash_attention=not stack.habits.stores_scores if run.run.flash_attention is None else run.run.flash_attention,
    )
    recomputations = recomputations_of(run.run, model, stack)
    if len(recomputations) > 1:
        assumed.append("recomputation not stated: the fastest that fits")
    stack = stack.with_recompute(*(choice.kind for choice in recomputations))
    context = CostContext(model, cluster, job, _shared(stack))
    batch, left_open = _batch(run.run, context, degrees, recomputations)
    kind, rank = memory_figure(run, stack.name)
    return Case(run, context, batch, (*assumed, *degrees.assumed, *left_open), kind, rank, known, timed)


def _task(run: MeasuredRun) -> Task:
    """The job's task in the words that sources use."""
    words = run.task.lower()
    if "lora" in words or "peft" in words:
        return "lora"
    return "sft" if "sft" in words or "fine" in words else "pretrain"


_STACKS: dict[tuple[object, ...], Backend] = {}


def _shared(stack: Backend) -> Backend:
    """The same object for equal stacks, so that records of one kind are priced together."""
    key = (stack.name, stack.habits, stack.recompute_kinds(None, None))  # type: ignore[arg-type]
    return _STACKS.setdefault(key, stack)


def _degrees(run: MeasuredConfiguration, model: ModelSpec, gpus: int, domain: int) -> _Degrees:
    assumed = [f"{name} 1 (not stated)" for name in ("tp", "pp", "cp") if getattr(run, name) is None]
    if len(assumed) > 1 and gpus > 8:
        raise Skip("parallel degrees not stated")
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    if gpus % (tp * pp * cp):
        raise Skip("tp * pp * cp does not divide the GPUs")
    dp = gpus // (tp * pp * cp)
    if run.global_batch is not None and run.global_batch < dp:
        raise Skip("global batch smaller than the data-parallel replicas")
    if run.dp is not None and run.dp != dp:
        raise Skip("tp * pp * cp * dp is not the number of GPUs")
    ep = run.ep or 1
    if run.ep is None and model.moe is not None and run.extra.get("dispatcher"):
        # Who names a dispatcher has expert parallelism: as much as the fast links reach.
        ep = math.gcd(model.moe.experts, math.gcd(tp * cp * dp, domain))
        assumed.append(f"ep {ep} (not stated)")
    etp = run.etp or (_split_experts(run, tp, ep, tp * cp * dp) if model.moe is not None else 1)
    if model.moe is not None and ((tp * cp * dp) % (ep * etp) or model.moe.experts % ep):
        raise Skip("ep does not divide the experts or the ranks")
    return _Degrees(tp, pp, cp, ep if model.moe else 1, etp if model.moe else 1, dp, assumed)


def _split_experts(run: MeasuredConfiguration, tp: int, ep: int, ranks: int) -> int:
    """Expert tensor parallelism where it is not stated: Megatron's default is that of dense matrices
    (expert_tensor_parallel_size); recipes that need the ranks for expert parallelism set 1."""
    splits = ep == 1 or (run.framework or "").lower().startswith(("megatron", "nemo"))
    return tp if splits and ranks % (ep * tp) == 0 else 1


def _batch(
    run: MeasuredConfiguration, context: CostContext, degrees: _Degrees, recomputations: tuple[Recomputation, ...]
) -> tuple[StrategyBatch, list[str]]:
    """All settings that the record admits, one row each."""
    layers, said = context.model.layers, []
    if degrees.pp > layers:
        raise Skip("more pipeline stages than layers")
    share = max(context.job.global_batch // degrees.dp, 1)
    micro: tuple[int, ...] = (run.micro_batch or 1,)
    if run.micro_batch is None and degrees.pp > 1:
        said.append("micro-batch 1 (not stated, pipeline)")
    elif run.micro_batch is None:
        micro = tuple(size for size in (1, 2, 4, LARGEST_MICRO_BATCH) if share % size == 0)
        said.append("micro-batch not stated: the fastest that fits")
    chunks: tuple[int, ...] = (run.vpp or 1,)
    if degrees.pp > 1 and run.vpp is None:
        stages = layers // degrees.pp
        chunks = tuple(size for size in range(1, stages + 1) if layers % (degrees.pp * size) == 0) or (1,)
        said.append("virtual stages not stated: the fastest")
    if degrees.pp == 1 or (
        context.backend.default_layout(context.model, degrees.pp, chunks[0]) is None
        and degrees.pp * chunks[0] > layers + _EMPTY_ENDS
    ):
        chunks = (1,)
    rows = [
        _row(run, context, degrees, size, vpp, index, choice.layers)
        for size, vpp, (index, choice) in product(micro, chunks, enumerate(recomputations))
    ]
    return StrategyBatch.concatenate(rows), said


def _row(
    run: MeasuredConfiguration,
    context: CostContext,
    degrees: _Degrees,
    micro_batch: int,
    vpp: int,
    recompute_kind: int,
    recompute_layers: int,
) -> StrategyBatch:
    def one(value: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array([value], dtype=np.int64)

    layout = (
        _stated_layout(run, context, degrees.pp * vpp)
        or context.backend.default_layout(context.model, degrees.pp, vpp)
        or _between_ends(context, degrees.pp * vpp)
    )
    if layout is None:
        raise Skip("layers cannot be split over the stages")
    # Where nothing is said: as much as the framework is built for, ZeRO-1 for Megatron, all of it for FSDP.
    zero = max(context.backend.zero_stages) if run.zero is None else run.zero
    if zero not in context.backend.zero_stages:
        # A framework without stage 2 that is said to shard gradients reduces them into shards once a step.
        zero = min(zero, max(context.backend.zero_stages))
    sequence_parallel = degrees.tp > 1 if run.sequence_parallel is None else run.sequence_parallel and degrees.tp > 1
    host = host_states_of(run)
    shard = _shard_degree(run, context, degrees)
    return StrategyBatch(
        tp=one(degrees.tp),
        sequence_parallel=np.array([sequence_parallel]),
        cp=one(degrees.cp),
        pp=one(degrees.pp),
        vpp=one(vpp),
        schedule=one(SCHEDULES.index(_schedule(run, degrees.pp, vpp))),
        ep=one(degrees.ep),
        etp=one(degrees.etp),
        dp=one(degrees.dp),
        zero_stage=one(zero),
        shard_degree=one(shard if zero else 1),
        secondary_shard_degree=one(0),
        micro_batch=one(micro_batch),
        recompute_kind=one(recompute_kind),
        recompute_layers=one(recompute_layers),
        offload_optimizer=np.array([host.optimizer if zero else 0.0]),
        offload_device=one(int(host.optimizer > 0.0 and zero > 0)),
        offload_parameters=one(int(host.parameters)),
        stage_layers=np.array([layout], dtype=np.int64),
    )


def _shard_degree(run: MeasuredConfiguration, context: CostContext, degrees: _Degrees) -> int:
    """GPUs over which sharded states are spread: all replicas, the stated size, or (hybrid sharding) a node's."""
    replicas = degrees.dp * degrees.cp
    instances = optimizer_instances(run)
    if instances > 1 and replicas % instances == 0:
        return replicas // instances
    # InternEvo calls the size of its optimizer shards zero1.
    stated = next((value for name, value in run.extra.items() if name == "fsdp_size" or name.startswith("zero1")), None)
    strategy = str(run.extra.get("fsdp_sharding_strategy") or run.extra.get("sharding_strategy") or "").lower()
    size = degree(stated)
    if size is not None and replicas % size == 0:
        return size
    node = max(context.cluster.gpus_per_node // degrees.tp, 1)
    hybrid = strategy.startswith(("hsdp", "hybrid"))
    return node if hybrid and replicas % node == 0 else replicas


def _stated_layout(run: MeasuredConfiguration, context: CostContext, stages: int) -> tuple[int, ...] | None:
    """Layers of each chunk where the record lists them all."""
    stated = run.extra.get("layers_per_stage")
    layers = tuple(degree(value) or 0 for value in stated) if isinstance(stated, list) else ()
    return layers if len(layers) == stages and sum(layers) == context.model.layers else None


def _between_ends(context: CostContext, stages: int) -> tuple[int, ...] | None:
    """One layer a chunk where embedding and loss take the first and the last chunk for themselves."""
    empty = stages - context.model.layers
    if not 0 < empty <= _EMPTY_ENDS or not context.backend.name.startswith("megatron"):
        return None
    return (*[0] * (empty // 2), *[1] * context.model.layers, *[0] * (empty - empty // 2))


def _schedule(run: MeasuredConfiguration, pp: int, vpp: int) -> str:
    if pp == 1:
        return "none"
    named = str(run.extra.get("pp_schedule") or "").lower()
    for start, schedule in _SCHEDULES.items():
        if named.startswith(start):
            return schedule
    return "interleaved" if vpp > 1 else "1f1b"


def memory_figure(run: MeasuredRun, stack: str) -> tuple[MemoryKind, str]:
    """Which memory figure the source prints, and of which rank.

    The source's own words count; without them Megatron logs show the allocator's peak and FSDP stacks its reserve."""
    words = (run.measured.peak_mem_kind or "").lower()
    rank = str(run.run.extra.get("memory_rank") or words).lower()
    place = "first" if "rank 0" in rank or "first pipeline" in rank else "last" if "last" in rank else "worst"
    if "first or last" in rank:
        place = "worst"
    if "nvidia-smi" in words:
        return "device", place
    if "reserved" in words:
        return "reserved", place
    if "alloc" in words or stack.startswith("megatron"):
        return "allocated", place
    return "reserved", place
