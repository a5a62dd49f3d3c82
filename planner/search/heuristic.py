"""The rule of thumb that introductions to distributed training teach, as a baseline for the searched optimum.

It looks at one number, the memory a single GPU would need over the memory it has, and knows nothing of time, network or
layout.  A plan never follows it; it shows what the search is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.backends import get_backend
from planner.cost.activations import saved_bytes
from planner.cost.context import CostContext, Work
from planner.cost.params import total_params
from planner.specs.cluster import Cluster
from planner.specs.convert import from_strategy
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.units import gib

RULE = "tutorial-9.1"

STATE_BYTES = 16
"""Bytes per parameter of mixed-precision Adam with 16-bit gradients (arXiv 1910.02054, section 3.1)."""
_ZERO_2_UP_TO = 2.0
_ZERO_3_UP_TO = 8.0
"""Needed over available memory up to which sharding alone is advised; beyond it, three dimensions."""

_STATE_SHARE = 0.5
"""Share of the memory that states may take under three dimensions; the guide leaves the rest to activations."""

Scheme = Literal["ddp", "zero-2", "zero-3", "3d"]


@dataclass(frozen=True)
class Baseline:
    """What the rule of thumb picks, and why."""

    scheme: Scheme
    needed_bytes: float
    """States and activations of one sequence on a single GPU."""
    available_bytes: float
    pins: dict[str, int | str]
    """The choice as pins (with the backend that has it) under which a search can price it."""
    why: str
    rule: str = RULE

    @property
    def gap(self) -> float:
        """Needed over available memory."""
        return self.needed_bytes / self.available_bytes


def baseline(model: ModelSpec, cluster: Cluster, job: Job) -> Baseline:
    """The scheme that the rule of thumb advises."""
    needed = STATE_BYTES * total_params(model) + _activation_bytes(model, cluster, job)
    available = float(cluster.memory_bytes_per_gpu)
    gap = needed / available
    start = f"one GPU would need {gib(needed)} of {gib(available)}, a factor of {gap:.2g}"
    if gap <= 1.0:
        return Baseline("ddp", needed, available, {"backend": "megatron", "zero_stage": 0}, f"{start}: replicate")
    if gap <= _ZERO_2_UP_TO:
        pins: dict[str, int | str] = {"backend": "deepspeed", "zero_stage": 2, "recompute": "full"}
        return Baseline("zero-2", needed, available, pins, f"{start}: shard gradients and optimizer, recompute")
    if gap <= _ZERO_3_UP_TO:
        pins = {"backend": "fsdp", "zero_stage": 3}
        return Baseline("zero-3", needed, available, pins, f"{start}: shard everything")
    return Baseline("3d", needed, available, _three_dimensions(model, cluster), f"{start}: split the model itself")


def _three_dimensions(model: ModelSpec, cluster: Cluster) -> dict[str, int | str]:
    """Tensor parallelism over a node, as few stages as hold the states, the rest data parallel, optimizer sharded."""
    tp = cluster.local_gpus
    nodes = cluster.gpus // tp
    depths = [depth for depth in range(1, nodes + 1) if nodes % depth == 0 and depth <= model.layers]
    states = STATE_BYTES * total_params(model)
    enough = [depth for depth in depths if states / (tp * depth) <= _STATE_SHARE * cluster.memory_bytes_per_gpu]
    return {"backend": "megatron", "tp": tp, "pp": min(enough, default=depths[-1]), "zero_stage": 1}


def _activation_bytes(model: ModelSpec, cluster: Cluster, job: Job) -> float:
    """Saved activations of one sequence without recomputation."""
    context = CostContext(model, cluster, job, get_backend("megatron"))
    one = Strategy(global_batch=job.global_batch, seq_len=job.seq_len, layers_per_stage=(model.layers,))
    work = Work(context, from_strategy(one, context.recompute_kinds))
    by_kind = {kind: sum(float(size[0]) for size in saved_bytes(work, kind).values()) for kind in context.kinds}
    return sum(by_kind[kind] for kind in model.layer_kinds())
