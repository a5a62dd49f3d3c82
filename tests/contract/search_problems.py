"""Small seeded search problems: tiny models on one node or two, with memory that is ample, tight or too small."""

from __future__ import annotations

import random
from typing import Any

from planner.backends.base import Backend
from planner.cost.evaluate import CostContext, evaluate
from planner.errors import InputError
from planner.search.engine import Problem
from planner.search.exhaustive import every_strategy
from planner.search.outcome import Pin
from planner.specs.cluster import Accelerator, Cluster, ComputeRates, DeviceMemory, Fabric, HostLink, Price
from planner.specs.job import Job, Objective
from planner.specs.model import ModelSpec, MoeSpec, WindowSpec

GIB = 1024**3
SOURCE: dict[str, Any] = {"source": ("made up for tests",), "as_of": "2025-01"}


def accelerator() -> Accelerator:
    """A made-up accelerator of about the size of an A100."""
    return Accelerator(
        id="test-gpu", vendor="nvidia", architecture="Hopper", sms=128,
        memory=DeviceMemory(advertised_bytes=80 * 10**9, allocatable_bytes=79 * GIB, bytes_per_s=2e12, **SOURCE),
        peak=ComputeRates(fp32=6e13, tf32=4e14, fp16=8e14, bf16=8e14, fp8=1.6e15, **SOURCE),
        achieved=ComputeRates(bf16=6e14, fp16=6e14, **SOURCE),
        fabric=Fabric(kind="nvlink4", topology="switch", domain_gpus=8, bytes_per_s=4e11, **SOURCE),
        host_link=HostLink(kind="pcie5", bytes_per_s=6e10, **SOURCE),
        network_bytes_per_s=5e10, price=Price(**SOURCE), confidence="b",
    )  # fmt: skip


def cluster(gpus: int, memory_bytes: int, host_bytes: int = 2000 * GIB, gpus_per_node: int = 8) -> Cluster:
    """One to a few small nodes."""
    return Cluster(
        accelerator=accelerator(), gpus=gpus, gpus_per_node=gpus_per_node, domain_gpus=gpus_per_node, nics_per_node=4,
        nic_bytes_per_s=5e10, memory_bytes_per_gpu=memory_bytes, host_memory_bytes_per_node=host_bytes,
        host_cores_per_node=64,
    )  # fmt: skip


def model(rng: random.Random) -> ModelSpec:
    """Dense, mixture of experts after dense layers, or alternating windows; heavy enough for memory to matter."""
    layers = rng.randint(2, 6)
    hidden = rng.choice([1024, 2048, 4096])
    moe = window = None
    shape = rng.choice(["dense", "dense", "moe", "window"])
    if shape == "moe":
        moe = MoeSpec(experts=4, top_k=2, expert_ffn=hidden, dense_first=rng.randint(0, min(2, layers - 1)))
    if shape == "window":
        window = WindowSpec(size=1024, global_every=2)
    return ModelSpec(
        name="tiny", layers=layers, hidden=hidden, ffn=3 * hidden, heads=16, kv_heads=rng.choice([4, 16]),
        head_dim=hidden // 16, vocab=rng.choice([32_000, 128_256]), max_seq=65_536, tied=rng.random() < 0.2, moe=moe,
        window=window,
    )  # fmt: skip


def problem(backend: Backend, seed: int, objective: Objective = "throughput") -> Problem:
    """Problem number ``seed``; its memory limit lies somewhere among what its strategies need, or a little below."""
    rng = random.Random(seed)
    spec = model(rng)
    gpus = rng.choice([1, 2, 4, 4, 6, 8])
    job = Job(
        seq_len=rng.choice([2048, 4096, 8192]), global_batch=rng.choice([4, 8, 12, 16]), objective=objective,
    )  # fmt: skip
    host = rng.choice([2000, 2000, 100]) * GIB
    context = CostContext(spec, cluster(gpus, 79 * GIB, host), job, backend)
    pins: dict[str, Pin] = rng.choice([{}, {}, {"recompute": "none"}, {"offload": "none"}, {"pp": min(gpus, 2)}])
    quantile = rng.choice([0.0, 0.02, 0.1, 0.3, 0.8, None, -1])
    if quantile is None:
        return Problem(context, pins)
    try:
        peaks = sorted(
            p for batch in every_strategy(Problem(context, pins)) for p in evaluate(context, batch).peak_memory_bytes
        )
    except InputError:
        return Problem(context, {})
    if not peaks:
        return Problem(context, pins)
    limit = 0.98 * peaks[0] if quantile == -1 else 1.0001 * peaks[int(quantile * (len(peaks) - 1))]
    tight = cluster(gpus, int(limit * context.memory_upper) + 1, host)
    return Problem(CostContext(spec, tight, job, backend), pins)
