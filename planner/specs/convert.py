"""Between the two forms of a strategy: the document that people and frameworks read, and the arrays that are
evaluated.

Both directions need the backend's recompute kinds, because a batch holds only an index into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from planner.errors import InputError
from planner.specs.batch import DEVICES, EVERY_LAYER, SCHEDULES, StrategyBatch
from planner.specs.job import Job
from planner.specs.strategy import Offload, OffloadDevice, Recompute, RecomputeMode, Strategy

_DEVICE_NAMES: tuple[OffloadDevice, ...] = ("none", "cpu", "nvme")


class Kind(Protocol):
    """What a conversion needs to know of a recompute kind (``planner.backends.base.RecomputeKind`` has it)."""

    @property
    def id(self) -> str: ...
    @property
    def mode(self) -> RecomputeMode: ...
    @property
    def modules(self) -> tuple[str, ...]: ...
    @property
    def layer_count(self) -> bool: ...


def to_strategy(batch: StrategyBatch, i: int, kinds: Sequence[Kind], job: Job) -> Strategy:
    """Candidate ``i`` as a document; ``kinds`` are the recompute kinds of its backend for this model."""
    stages = int(batch.pp[i] * batch.vpp[i])
    layers = tuple(int(count) for count in batch.stage_layers[i, :stages])
    secondary = int(batch.secondary_shard_degree[i])
    return Strategy(
        tp=int(batch.tp[i]),
        sequence_parallel=bool(batch.sequence_parallel[i]),
        cp=int(batch.cp[i]),
        pp=int(batch.pp[i]),
        vpp=int(batch.vpp[i]),
        pipeline_schedule=SCHEDULES[int(batch.schedule[i])],
        layers_per_stage=layers,
        ep=int(batch.ep[i]),
        etp=int(batch.etp[i]),
        dp=int(batch.dp[i]),
        zero_stage=int(batch.zero_stage[i]),
        shard_degree=int(batch.shard_degree[i]),
        secondary_shard_degree=secondary or None,
        micro_batch=int(batch.micro_batch[i]),
        grad_accum=int(batch.grad_accum(job.global_batch)[i]),
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        precision=job.precision,
        recompute=_recompute(kinds[int(batch.recompute_kind[i])], int(batch.recompute_layers[i]), layers),
        offload=Offload(
            optimizer=float(batch.offload_optimizer[i]),
            parameters=_DEVICE_NAMES[int(batch.offload_parameters[i])],
            device=_DEVICE_NAMES[int(batch.offload_device[i])],
        ),
    )


def _recompute(kind: Kind, most: int, layers: tuple[int, ...]) -> Recompute:
    if kind.mode == "none" or (kind.layer_count and most == 0):
        return Recompute()
    if not kind.layer_count or most >= max(layers):
        return Recompute(mode=kind.mode, modules=kind.modules)
    return Recompute(mode=kind.mode, modules=kind.modules, layers_per_stage=tuple(min(most, count) for count in layers))


def from_strategy(strategy: Strategy, kinds: Sequence[Kind]) -> StrategyBatch:
    """A batch of one row; raises InputError for a recompute choice that the backend's ``kinds`` cannot express."""
    stages = strategy.pp * strategy.vpp
    if len(strategy.layers_per_stage) != stages:
        raise InputError(
            f"layers_per_stage must have pp({strategy.pp}) * vpp({strategy.vpp}) = {stages} entries",
            where="strategy.layers_per_stage",
            got=str(list(strategy.layers_per_stage)),
            hint="give the layers of every virtual stage in model order",
        )
    kind, most = _kind_of(strategy, kinds)

    def one(value: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array([value], dtype=np.int64)

    return StrategyBatch(
        tp=one(strategy.tp),
        sequence_parallel=np.array([strategy.sequence_parallel]),
        cp=one(strategy.cp),
        pp=one(strategy.pp),
        vpp=one(strategy.vpp),
        schedule=one(SCHEDULES.index(strategy.pipeline_schedule)),
        ep=one(strategy.ep),
        etp=one(strategy.etp),
        dp=one(strategy.dp),
        zero_stage=one(strategy.zero_stage),
        shard_degree=one(strategy.shard_degree),
        secondary_shard_degree=one(strategy.secondary_shard_degree or 0),
        micro_batch=one(strategy.micro_batch),
        recompute_kind=one(kind),
        recompute_layers=one(most),
        offload_optimizer=np.array([strategy.offload.optimizer]),
        offload_device=one(DEVICES.index(strategy.offload.device)),
        offload_parameters=one(DEVICES.index(strategy.offload.parameters)),
        stage_layers=np.array([strategy.layers_per_stage], dtype=np.int64),
    )


def _kind_of(strategy: Strategy, kinds: Sequence[Kind]) -> tuple[int, int]:
    """Index of the recompute kind and the most recomputed layers of a virtual stage."""
    wanted = strategy.recompute
    counts = wanted.layers_per_stage
    if wanted.mode == "none" or (counts is not None and not any(counts)):
        return next(index for index, kind in enumerate(kinds) if kind.mode == "none"), 0
    for index, kind in enumerate(kinds):
        same_modules = sorted(kind.modules) == sorted(wanted.modules)
        if kind.mode == wanted.mode and same_modules and (counts is None or kind.layer_count):
            return index, EVERY_LAYER if counts is None else _most(counts, strategy.layers_per_stage)
    raise InputError(
        "this recompute choice does not exist here",
        where="strategy.recompute",
        got=f"mode {wanted.mode}, modules {list(wanted.modules)}, layers_per_stage {counts}",
        allowed="; ".join(
            f"mode {kind.mode}, modules {list(kind.modules)}" + (", layers_per_stage" if kind.layer_count else "")
            for kind in kinds
        ),
        hint="use one of the allowed combinations of mode and modules",
    )


def _most(counts: tuple[int, ...], layers: tuple[int, ...]) -> int:
    most = max(counts)
    expected = tuple(min(most, count) for count in layers)
    if counts != expected:
        raise InputError(
            "every virtual stage recomputes the same number of layers, or all it has",
            where="strategy.recompute.layers_per_stage",
            got=str(list(counts)),
            allowed=str(list(expected)),
            hint=f"with {most} recomputed layers a stage the list is {list(expected)}",
        )
    return most
