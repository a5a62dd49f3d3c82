"""Strategies that accelerate runs by itself, FSDP and plain replication, as the planner states them.

What the Trainer adds (batch, recomputation, number format) is the same whatever runs underneath."""

from __future__ import annotations

from typing import Any

from planner.reading.configuration import Configuration, StatedStrategy
from planner.reading.huggingface.fsdp import Sharding
from planner.reading.huggingface.launch import PRECISIONS, Machines, Mesh
from planner.reading.huggingface.training_arguments import TrainerSays
from planner.reading.huggingface.values import Section
from planner.specs.job import Precision
from planner.specs.strategy import Offload, Recompute


def with_fsdp(
    top: Section, sharding: Sharding, says: TrainerSays | None, machines: Machines, mesh: Mesh, stated: Precision | None
) -> Configuration:
    """FSDP: the mesh, or all processes where there is none."""
    gpus = machines.gpus
    if mesh.stated and gpus is not None and mesh.size != gpus:
        top.section("parallelism_config").notes.add(
            "world-size",
            "error",
            f"dp_replicate({mesh.replicate}) * dp_shard({mesh.shard}) * tp({mesh.tp}) * cp({mesh.cp}) * sp({mesh.sp}) "
            f"= {mesh.size}, but num_processes is {gpus}: accelerate stops",
            "parallelism_config",
            allowed=str(gpus),
        )
    if mesh.sp > 1:
        top.add("sequence-parallel-backend", "error", "sp_size needs DeepSpeed", "parallelism_config", hint="cp_size")
    if mesh.stated and mesh.size > 1 and sharding.version == 1:
        top.add(
            "parallelism-version", "error", "parallelism_config needs fsdp_version 2", "parallelism_config", allowed="2"
        )
    dp, shard = _groups(sharding, machines, mesh)
    _check_checkpointing(top, sharding, says)
    unsharded = says is not None and (says.grad_accum or 1) > 1 and not says.sync_each_batch and bool(sharding.stage)
    if unsharded and says is not None:
        says.section.add(
            "unsharded-gradients",
            "warning",
            "between micro-batches every GPU keeps the gradients of all its parameters unsharded (no_sync)",
            "gradient_accumulation_steps",
            hint='"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": true}}',
        )
    offload = None
    if sharding.offload is not None:
        offload = Offload(optimizer=1.0, parameters="cpu", device="cpu") if sharding.offload else Offload()
    return Configuration(
        format="accelerate FSDP" + (f" version {sharding.version}" if sharding.version else ""),
        backend="accelerate-fsdp",
        gpus=gpus,
        gpus_per_node=machines.gpus_per_node,
        global_batch=_global_batch(says, dp),
        precision=settled_precision(top, says, stated),
        strategy=_strategy(
            says,
            tp=mesh.tp,
            cp=mesh.cp,
            dp=dp,
            zero_stage=sharding.stage,
            shard_degree=1 if sharding.stage == 0 else shard,
            recompute=_either(sharding, says),
            offload=offload,
        ),
        habits={"accumulates_unsharded": True} if unsharded else {},
    )


def _groups(sharding: Sharding, machines: Machines, mesh: Mesh) -> tuple[int | None, int | None]:
    """(replicas, ranks that share one copy)."""
    if mesh.stated and mesh.size > 1:
        return mesh.replicate * mesh.shard, mesh.shard * mesh.cp
    return machines.gpus, machines.gpus_per_node if sharding.hybrid else machines.gpus


def _check_checkpointing(top: Section, sharding: Sharding, says: TrainerSays | None) -> None:
    if sharding.recompute and says is not None and says.recompute is not None and says.recompute.mode == "full":
        top.add(
            "recompute-twice",
            "error",
            "FSDP's activation checkpointing and the Trainer's are both on: the Trainer stops",
            "fsdp_config",
            hint="set gradient_checkpointing to false",
        )


def _either(sharding: Sharding, says: TrainerSays | None) -> Recompute | None:
    """FSDP's own checkpointing or the Trainer's."""
    if sharding.recompute:
        return Recompute(mode="full")
    own = None if sharding.recompute is None else Recompute()
    return says.recompute if says is not None else own


def replicated(top: Section, says: TrainerSays | None, machines: Machines, stated: Precision | None) -> Configuration:
    """DistributedDataParallel, or one process: nothing is sharded."""
    if says is not None and (loaded := says.section.word("dtype") or says.section.word("torch_dtype")) not in (
        None,
        "auto",
        "float32",
    ):
        says.section.notes.skip(f"dtype: {loaded} (weights and optimizer in 16 bits are priced as fp32)")
    return Configuration(
        format="accelerate with DistributedDataParallel",
        backend="fsdp",
        gpus=machines.gpus,
        gpus_per_node=machines.gpus_per_node,
        global_batch=_global_batch(says, machines.gpus),
        precision=settled_precision(top, says, stated),
        strategy=_strategy(
            says,
            tp=1,
            cp=1,
            dp=machines.gpus,
            zero_stage=0,
            shard_degree=1,
            recompute=says.recompute if says is not None else None,
            offload=Offload(),
        ),
    )


PLAIN: dict[str, Any] = {
    "sequence_parallel": False,
    "pp": 1,
    "vpp": 1,
    "pipeline_schedule": "none",
    "ep": 1,
    "etp": 1,
}
"""What neither kind has."""


def _strategy(says: TrainerSays | None, **fields: Any) -> StatedStrategy:
    return StatedStrategy(
        **PLAIN,
        micro_batch=says.micro_batch if says is not None else None,
        grad_accum=says.grad_accum if says is not None else None,
        **fields,
    )


def _global_batch(says: TrainerSays | None, dp: int | None) -> int | None:
    if says is None or not (says.micro_batch and says.grad_accum and dp):
        return None
    return says.micro_batch * says.grad_accum * dp


def settled_precision(top: Section, says: TrainerSays | None, stated: Precision | None) -> Precision | None:
    """The Trainer's bf16 and fp16 win over the launcher's word (training_args.py, mixed_precision)."""
    own = PRECISIONS[says.precision] if says is not None and says.precision is not None else None
    if own is not None and stated is not None and own != stated:
        top.add(
            "precision-mismatch",
            "warning",
            f"mixed_precision is {stated}, but the Trainer's arguments say {own}, which wins",
            "mixed_precision",
            hint="say the same in both",
        )
    return own or stated or ("fp32" if says is not None else None)
