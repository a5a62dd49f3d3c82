"""Short ways to state a cost question in a test: catalogue machines, a job, one strategy with neutral defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.backends import get_backend
from planner.backends.base import Backend, RuleContext
from planner.catalog import default_system, load_accelerator, load_model, load_system
from planner.cost.context import CostContext, Work
from planner.cost.estimate import estimate
from planner.cost.evaluate import Evaluation, evaluate
from planner.cost.step import Step
from planner.specs.batch import SCHEDULES, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Breakdown, Estimate


def machines(accelerator: str = "h100", gpus: int = 8, *, system: str | None = None, **changes: Any) -> Cluster:
    """``gpus`` of the accelerator in the nodes that the catalogue knows; ``changes`` replace fields of the cluster."""
    device = load_accelerator(accelerator)
    node = load_system(system) if system else default_system(accelerator)
    fields: dict[str, Any] = {
        "accelerator": device,
        "gpus": gpus,
        "gpus_per_node": node.gpus_per_node,
        "domain_gpus": node.domain_gpus,
        "nics_per_node": node.nics_per_node,
        "nic_bytes_per_s": node.nic_bytes_per_s,
        "network_bus_bytes_per_s": node.network_bus_bytes_per_s,
        "memory_bytes_per_gpu": device.memory.allocatable_bytes,
        "host_memory_bytes_per_node": node.host_memory_bytes_per_node,
        "host_cores_per_node": node.host_cores_per_node,
    }
    return Cluster(**{**fields, **changes})


def question(
    model: str | ModelSpec = "llama-2-7b",
    cluster: Cluster | None = None,
    backend: str | Backend = "megatron",
    **job: Any,
) -> CostContext:
    """A cost context; the job defaults to eight sequences of 2048 tokens."""
    return CostContext(
        model=load_model(model).spec if isinstance(model, str) else model,
        cluster=cluster or machines(),
        job=Job(**{"seq_len": 2048, "global_batch": 8, **job}),
        backend=get_backend(backend) if isinstance(backend, str) else backend,
    )


def strategy(context: CostContext, *, recompute: str = "none", **columns: Any) -> StrategyBatch:
    """One strategy: unstated degrees are 1, dp fills the cluster, shards span it, the framework splits the layers."""
    values: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "zero_stage": 0, **columns}
    values.setdefault("dp", context.cluster.gpus // (values["tp"] * values["cp"] * values["pp"]))
    whole = values["dp"] * values["cp"]
    values.setdefault("shard_degree", whole if values["zero_stage"] else 1)
    choices = context.backend.schedules(values["pp"], values["vpp"])
    schedule = values.pop("schedule", choices[0])
    layout = context.backend.default_layout(context.model, values["pp"], values["vpp"])
    layers: tuple[int, ...] | None = values.pop("stage_layers", layout)
    if layers is None:
        raise ValueError(f"{context.model.layers} layers have no default split: give stage_layers")
    kinds = [kind.id for kind in context.recompute_kinds]
    most = values.pop("recompute_layers", 1 << 14 if recompute != "none" else 0)

    def one(value: Any) -> Any:
        return np.array([value])

    return StrategyBatch(
        **{name: one(values[name]) for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "zero_stage")},
        shard_degree=one(values["shard_degree"]),
        sequence_parallel=one(bool(values.get("sequence_parallel", False))),
        schedule=one(SCHEDULES.index(schedule)),
        secondary_shard_degree=one(values.get("secondary_shard_degree", 0)),
        micro_batch=one(values.get("micro_batch", 1)),
        recompute_kind=one(kinds.index(recompute)),
        recompute_layers=one(most),
        offload_optimizer=one(float(values.get("offload_optimizer", 0.0))),
        offload_device=one(values.get("offload_device", 0)),
        offload_parameters=one(values.get("offload_parameters", 0)),
        stage_layers=one(layers),
    )


def legal(context: CostContext, batch: StrategyBatch) -> list[str]:
    """Ids of the backend's rules that the batch breaks."""
    rules = RuleContext(context.model, context.cluster, context.job, batch, context.recompute_kinds)
    return [rule.id for rule, broken in context.backend.broken_rules(rules) if broken.any()]


def priced(context: CostContext, **columns: Any) -> Evaluation:
    return evaluate(context, strategy(context, **columns))


def estimated(context: CostContext, **columns: Any) -> Estimate:
    return estimate(context, strategy(context, **columns))


def step_of(context: CostContext, **columns: Any) -> Step:
    """All intermediate results for one strategy."""
    batch = strategy(context, **columns)
    return Step(Work(context, batch), int(batch.pp[0]))


def walk(tree: Breakdown) -> Iterator[Breakdown]:
    """The node and everything below it."""
    yield tree
    for child in tree.children:
        yield from walk(child)


def under(tree: Breakdown, name: str) -> float:
    """Sum of the nodes called ``name``."""
    return sum(node.value for node in walk(tree) if node.name == name)


def names(tree: Breakdown) -> set[str]:
    return {node.name for node in walk(tree)}
