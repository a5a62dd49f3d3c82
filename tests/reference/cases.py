"""Reads the published runs of measured_runs.yaml into the product's own inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.backends.megatron import te_loss_bytes
from planner.backends.stacks import STACKS
from planner.catalog import default_system, load_accelerator, load_model
from planner.cost.context import CostContext
from planner.specs.batch import StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.convert import from_strategy
from planner.specs.job import Job
from planner.specs.strategy import Schedule, Strategy


@dataclass(frozen=True)
class MeasuredRun:
    """One run and what was measured."""

    id: str
    context: CostContext
    batch: StrategyBatch
    step_time_s: float | None
    tolerance: float
    allocated_gib: float | None
    reserved_gib: float | None
    memory_tolerance: float


def reference_cluster(gpu: str, gpus: int, gpus_per_node: int) -> Cluster:
    """The accelerator's reference node type with the run's own GPU count."""
    accelerator = load_accelerator(gpu)
    system = default_system(accelerator.id)
    share = gpus_per_node / system.gpus_per_node
    bus = system.network_bus_bytes_per_s
    return Cluster(
        accelerator=accelerator,
        gpus=gpus,
        gpus_per_node=min(gpus, gpus_per_node),
        domain_gpus=system.domain_gpus,
        nics_per_node=max(1, round(system.nics_per_node * share)),
        nic_bytes_per_s=system.nic_bytes_per_s,
        network_bus_bytes_per_s=None if bus is None else bus * share,
        memory_bytes_per_gpu=accelerator.memory.allocatable_bytes,
        host_memory_bytes_per_node=system.host_memory_bytes_per_node,
        host_cores_per_node=system.host_cores_per_node,
    )


def _run(case: dict[str, Any]) -> MeasuredRun:
    backend = STACKS[case["backend"]]
    if not case["tp_comm_overlap"]:
        backend = backend.with_habits(tensor_parallel_overlap=False)
    if "allocated_gib" in case:
        # The weighed runs fused the loss with Transformer Engine, which plans cannot ask for any more.
        backend = backend.with_habits(loss_bytes_per_logit=te_loss_bytes)
    if case.get("compiled"):
        # torch.compile fuses the elementwise kernels of a block and no longer saves their intermediates.
        backend = backend.with_habits(fused_kernels=True, activation_overhead=1.0, kernels_per_layer=40)
    model = load_model(case["model"]).spec
    model = model.model_copy(update=case.get("overrides", {}))
    cluster = reference_cluster(case["gpu"], case["gpus"], case["gpus_per_node"])
    context = CostContext(model, cluster, Job(**case["job"]), backend)
    given = dict(case["strategy"])
    stages = given.get("pp", 1) * given.get("vpp", 1)
    schedule: Schedule = "none" if stages == 1 else "interleaved" if given.get("vpp", 1) > 1 else "1f1b"
    accumulation = context.job.global_batch // (given["micro_batch"] * given["dp"])
    sharded = given["dp"] * given.get("cp", 1) if given["zero_stage"] else 1
    strategy = Strategy(
        **given,
        pipeline_schedule=schedule,
        grad_accum=accumulation,
        shard_degree=sharded,
        global_batch=context.job.global_batch,
        seq_len=context.job.seq_len,
        precision=context.job.precision,
    )
    return MeasuredRun(
        id=case["id"],
        context=context,
        batch=from_strategy(strategy, context.recompute_kinds),
        step_time_s=case.get("step_time_s"),
        tolerance=case.get("tolerance", 0.0),
        allocated_gib=case.get("allocated_gib"),
        reserved_gib=case.get("reserved_gib"),
        memory_tolerance=case.get("memory_tolerance", 0.0),
    )


def measured_runs() -> list[MeasuredRun]:
    """All runs of the data file."""
    text = Path(__file__).with_name("measured_runs.yaml").read_text(encoding="utf-8")
    return [_run(case) for case in yaml.safe_load(text)]
