"""The processor in the place of GPUs: host time adds to the kernels', nothing overlaps, and ranks share cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.backends import get_backend
from planner.catalog import load_accelerator
from planner.cost.context import CostContext, Work
from planner.cost.estimate import estimate
from planner.cost.pipeline import rank_weights
from planner.cost.step import Step
from planner.service.clusters import resolve_cluster
from planner.service.requests import ClusterInput
from planner.specs.batch import SCHEDULES, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from tests.helpers import make_batch

TINY = ModelSpec(name="tiny", layers=8, hidden=256, ffn=688, heads=8, kv_heads=4, head_dim=32, vocab=2048, max_seq=4096)
JOB = Job(seq_len=128, global_batch=64, precision="fp32")


def machine(ranks: int, cores: int) -> Cluster:
    resolved = resolve_cluster(ClusterInput(gpu="cpu", gpus=ranks, host_memory_gib=16.0)).cluster
    return resolved.model_copy(update={"host_cores_per_node": cores})


def context(ranks: int, cores: int) -> CostContext:
    return CostContext(TINY, machine(ranks, cores), JOB, get_backend("pytorch"))


def layout(**values: Any) -> StrategyBatch:
    values = {"sequence_parallel": [False], "stage_layers": [8], **values}
    return make_batch(**values)


def pipelined(pp: int, dp: int) -> StrategyBatch:
    return layout(
        pp=[pp], dp=[dp], schedule=[SCHEDULES.index("1f1b")], micro_batch=[4], stage_layers=[*(8 // pp,) * pp]
    )


@pytest.mark.parametrize(
    ("ranks", "cores", "share", "turns"), [(4, 8, 2, 1), (4, 4, 1, 1), (4, 2, 0.5, 2), (2, 3, 1, 1)]
)
def test_ranks_share_cores(ranks: int, cores: int, share: float, turns: float) -> None:
    cluster = machine(ranks, cores)
    assert (cluster.cores_per_rank, cluster.ranks_per_core) == (share, turns)


def test_a_gpu_has_no_cores_to_share() -> None:
    gpu = resolve_cluster(ClusterInput(gpu="h100", gpus=8)).cluster
    assert (gpu.cores_per_rank, gpu.ranks_per_core) == (1.0, 1.0)


def test_host_time_adds_to_the_kernels() -> None:
    """On a GPU a layer takes the longer of the two; where the host computes it takes both."""
    layer = Step(Work(context(4, 4), layout(dp=[4], micro_batch=[4])), 1).layers[0]
    assert layer.host_floor[0] > 0
    assert layer.total()[0] == pytest.approx(layer.forward()[0] + layer.backward()[0] + layer.host_floor[0])
    longer = replace(layer, synchronous=False).total()
    assert longer[0] == pytest.approx(max(layer.forward()[0] + layer.backward()[0], layer.host_floor[0]))


def test_gradient_traffic_does_not_hide() -> None:
    step = Step(Work(context(4, 4), layout(dp=[4], micro_batch=[4])), 1)
    assert step.window_share.tolist() == [0.0]
    found = estimate(context(4, 4), layout(dp=[4], micro_batch=[4]))
    exposed = next(part.value for part in found.time.children if part.name == "exposed gradient traffic")
    assert exposed == pytest.approx(float(step.layer_traffic[0].once[0]) * 8, rel=0.2)


def test_half_the_cores_take_twice_as_long() -> None:
    """All ranks compute at once, so a step without a pipeline scales with the cores."""
    batch = layout(dp=[4], micro_batch=[4])
    whole, half = (estimate(context(4, cores), batch).step_time_s for cores in (4, 2))
    assert half == pytest.approx(2.0 * whole, rel=0.02)


def simulated_step(pp: int, micro_batches: int, cores_per_replica: float) -> float:
    """Seconds of a 1F1B step whose forward and backward passes take 1 and 2 core-seconds, the ready stages sharing the
    cores equally (at most one each); a fluid simulation."""
    order = [_order_of(rank, pp, micro_batches) for rank in range(pp)]
    done: set[tuple[int, str, int]] = set()
    at, left, now = [0] * pp, [0.0] * pp, 0.0
    for rank in range(pp):
        left[rank] = 1.0
    while any(at[rank] < len(order[rank]) for rank in range(pp)):
        ready = [
            rank for rank in range(pp) if at[rank] < len(order[rank]) and _ready(rank, order[rank][at[rank]], pp, done)
        ]
        speed = min(1.0, cores_per_replica / len(ready))
        passed = min(left[rank] for rank in ready) / speed
        now += passed
        for rank in ready:
            left[rank] -= passed * speed
            if left[rank] < 1e-9:
                done.add((rank, *order[rank][at[rank]]))
                at[rank] += 1
                if at[rank] < len(order[rank]):
                    left[rank] = 1.0 if order[rank][at[rank]][0] == "F" else 2.0
    return now


def _order_of(rank: int, pp: int, micro_batches: int) -> list[tuple[str, int]]:
    warm = min(pp - rank, micro_batches)
    order = [("F", index) for index in range(warm)]
    for index in range(micro_batches):
        order.append(("B", index))
        if warm + index < micro_batches:
            order.append(("F", warm + index))
    return order


def _ready(rank: int, task: tuple[str, int], pp: int, done: set[tuple[int, str, int]]) -> bool:
    kind, index = task
    if kind == "F":
        return rank == 0 or (rank - 1, "F", index) in done
    return (rank == pp - 1 or (rank + 1, "B", index) in done) and (rank, "F", index) in done


@pytest.mark.parametrize(("pp", "turns"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("micro_batches", [2, 4, 8, 16])
def test_idle_stages_leave_their_cores_to_the_others(pp: int, micro_batches: int, turns: int) -> None:
    """The bubble of a pipeline on shared cores against a simulation, within 15 %."""
    batch = pipelined(pp, 1)
    work = Work(
        replace(context(pp, pp // turns), job=JOB.model_copy(update={"global_batch": 4 * micro_batches})), batch
    )
    slowest, others = (float(weight[0]) for weight in rank_weights(work))
    predicted = 3.0 * turns * (slowest + others * (pp - 1))
    measured = simulated_step(pp, micro_batches, pp / turns)
    assert predicted == pytest.approx(measured, rel=0.15)
    assert others <= max(slowest, 1.0)


def test_the_planning_machine_is_read() -> None:
    """Cores and memory come from the operating system and are listed as assumed; given ones win."""
    read = resolve_cluster(ClusterInput(gpu="cpu", gpus=2))
    assert {"cluster.host_cores_per_node", "cluster.host_memory_bytes_per_node"} <= {a.field for a in read.assumptions}
    assert read.cluster.memory_bytes_per_gpu * 2 < read.cluster.host_memory_bytes_per_node
    told = resolve_cluster(ClusterInput(gpu="cpu", gpus=2, host_memory_gib=8.0)).cluster
    assert told.host_memory_bytes_per_node == 8 * 2**30
    assert np.isclose(told.memory_bytes_per_gpu, 0.45 * 8 * 2**30, rtol=1e-6)


def test_only_the_processor_is_synchronous() -> None:
    assert load_accelerator("cpu").synchronous
    assert not load_accelerator("h100").synchronous
