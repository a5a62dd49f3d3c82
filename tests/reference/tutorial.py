"""Quantities of the tutorial that several of its tests and docs/tutorial.md use, from the product's own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.catalog import load_model
from planner.cost.collectives import Group, group
from planner.cost.groups import Groups
from planner.cost.sharding import Weights, traffic
from planner.specs.cluster import Cluster
from planner.specs.model import ModelSpec
from planner.units import GB
from tests.strategies import estimated, machines, question, step_of, strategy, under
from tests.unit.test_pipeline import closed_form

ROOT = Path(__file__).parents[2]
SEVEN_B = "llama-2-7b"


def spec(name: str) -> ModelSpec:
    return load_model(name).spec


def states_per_param(backend: str, zero_stage: int, shard: int = 1, precision: str = "bf16") -> dict[str, float]:
    """Bytes per parameter that one GPU holds, by kind, and their sum under ``total``."""
    context = question(backend=backend, precision=precision)
    batch = strategy(context, zero_stage=zero_stage, shard_degree=shard)
    held = context.backend.state_bytes(context.job, batch, np.array([shard]))
    parts = {name: float(getattr(held, name)[0]) for name in ("weights", "gradients", "optimizer")}
    return {**parts, "total": sum(parts.values())}


def paper_states(zero_stage: int, shard: int) -> float:
    """With 16-bit gradients only, as arXiv 1910.02054 counts: DeepSpeed's layout less its fp32 accumulation."""
    held = states_per_param("deepspeed", zero_stage, shard)
    sharded = shard if zero_stage >= 2 else 1
    weights = held["weights"]
    return weights + 2.0 / sharded + held["optimizer"]


def model_states_gb(model: str, backend: str) -> float:
    """Weights, gradients and optimizer of the whole model on one GPU, from the memory tree, GB."""
    memory = estimated(question(model, machines("b300", 1), backend, global_batch=1)).memory
    phase = memory.children[0].children[0]
    return sum(under(phase, name) for name in ("weights", "gradients", "optimizer")) / GB


def activations_gb(model: str, *, flash_attention: bool = True) -> float:
    """Saved activations of one sequence of 2048 tokens, no recomputation, GB."""
    step = step_of(question(model, machines("b300", 1), global_batch=1, flash_attention=flash_attention))
    return float(step.activation_bytes[0, 0]) * spec(model).layers / GB


def tutorial_activations_gb(model: ModelSpec, seq_len: int = 2048) -> float:
    """The tutorial's formula: attention 2 b s d (1 + s/d), FFN 2 b s d_ff a layer."""
    width = model.hidden
    layer = 2 * seq_len * width * (1 + seq_len / width) + 2 * seq_len * model.ffn
    return model.layers * layer / GB


def placed(cluster: Cluster, size: int, stride: int = 1) -> Group:
    return group(question(cluster=cluster), np.array([size]), np.array([stride]))


def without_latency(ranks: Group) -> Group:
    """The same group in the limit of large messages, where time is volume over bandwidth."""
    zero = np.zeros(1)
    return replace(ranks, latency_s=zero, reduce_latency_s=zero, half_message_bytes=zero)


def all_reduce_volume_gb(size: int, payload_gb: float) -> float:
    """Bytes that an all-reduce puts on one rank's link: seconds times bandwidth."""
    ranks = without_latency(placed(machines("h100", 8), size))
    return float(ranks.all_reduce_s(np.array([payload_gb]))[0] * ranks.reduce_bus_bytes_per_s[0])


def all_reduce_ms(cluster: Cluster, size: int, payload: float, stride: int = 1) -> float:
    return float(placed(cluster, size, stride).all_reduce_s(np.array([payload]))[0]) * 1e3


def shard_volume(zero_stage: int, micro_batches: int = 1) -> float:
    """Bytes moved by data parallelism in one step over 16-bit parameter bytes, in units of (N-1)/N P.

    On A100, whose switches do not reduce: every collective then has the same bandwidth and times compare like volumes.
    """
    context = question(backend="deepspeed", cluster=machines("a100", 8), global_batch=8)
    step = step_of(context, zero_stage=zero_stage)
    params = np.array([1e13])  # so large that message-size losses vanish
    moved = traffic(step.work, Groups(step.work), Weights(params, np.zeros(1)))
    seconds = moved.once + micro_batches * (moved.forward + moved.backward)
    ranks = step.groups.data
    return round(float(seconds[0] * ranks.bus_bytes_per_s[0] / ranks.fraction[0] / (2 * params[0])), 2)


def bubble_share(p: int, m: int, schedule: str = "1f1b", v: int = 1) -> float:
    """Share of a step in which equal stages idle."""
    seconds = closed_form(schedule, p, m, [v * 3] * p if v == 1 else [3] * (p * v), v).seconds
    return 1.0 - m * 3 * v / seconds


def rendered_sources() -> str:
    folders = [ROOT / "templates", ROOT / "planner" / "render"]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".j2", ".py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)
