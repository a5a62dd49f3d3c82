"""Physics that the cost model keeps for any legal strategy: monotone in the machine, additive in its trees, quiet where
nothing is split."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.backends import BACKENDS
from planner.cost.context import CostContext
from planner.cost.estimate import estimate
from planner.cost.evaluate import evaluate
from planner.search.space import enumerate_space
from planner.specs.batch import StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.plan import Breakdown
from tests.strategies import estimated, machines, names, priced, question, step_of, walk

FEW = settings(max_examples=80, deadline=None, derandomize=True, database=None)
MODELS = ("llama-3.2-1b", "llama-3-8b", "mixtral-8x7b")
GPUS = 16


@lru_cache(maxsize=16)
def everything(backend: str, model: str) -> tuple[CostContext, tuple[StrategyBatch, ...]]:
    """A question on sixteen H100 and all its legal strategies, grouped by pipeline shape."""
    context = question(model, machines("h100", GPUS), backend, seq_len=2048, global_batch=32)
    return context, tuple(group.batch for group in enumerate_space(context, {}).groups)


@lru_cache(maxsize=1)
def answered() -> tuple[tuple[str, str], ...]:
    """Backends with the models that they can train."""
    return tuple((backend, model) for backend in sorted(BACKENDS) for model in MODELS if everything(backend, model)[1])


@st.composite
def any_plan(draw: st.DrawFn) -> tuple[CostContext, StrategyBatch]:
    """One legal strategy of any backend and model."""
    context, groups = everything(*draw(st.sampled_from(answered())))
    batch = groups[draw(st.integers(0, len(groups) - 1))]
    row = draw(st.integers(0, len(batch) - 1))
    return context, batch.take(slice(row, row + 1))


def on(context: CostContext, cluster: Cluster) -> CostContext:
    return CostContext(context.model, cluster, context.job, context.backend)


def faster(cluster: Cluster, part: str, factor: float) -> Cluster:
    """The cluster with one of its rates multiplied."""
    device = cluster.accelerator
    if part == "network":
        bus = cluster.network_bus_bytes_per_s
        changed = {
            "nic_bytes_per_s": cluster.nic_bytes_per_s * factor,
            "network_bus_bytes_per_s": None if bus is None else bus * factor,
        }
        return cluster.model_copy(update=changed)
    if part == "memory":
        rates: Any = device.memory
        fields = ["bytes_per_s"]
    elif part == "fabric":
        rates = device.fabric
        fields = [name for name in type(rates).model_fields if name.endswith("bytes_per_s") and getattr(rates, name)]
    else:
        rates = device.peak
        fields = ["fp32", "fp16", "bf16", "fp8"]
    scaled = rates.model_copy(update={name: getattr(rates, name) * factor for name in fields})
    key = {"memory": "memory", "fabric": "fabric", "compute": "peak"}[part]
    return cluster.model_copy(update={"accelerator": device.model_copy(update={key: scaled})})


@pytest.mark.parametrize("part", ["memory", "fabric", "network", "compute"])
@given(plan=any_plan(), factor=st.sampled_from([1.1, 2.0, 10.0]))
@FEW
def test_better_machines_are_never_slower(part: str, plan: tuple[CostContext, StrategyBatch], factor: float) -> None:
    """More memory, fabric or network bandwidth, or a faster accelerator, never lengthens a step."""
    context, batch = plan
    before = evaluate(context, batch).step_time_s[0]
    after = evaluate(on(context, faster(context.cluster, part, factor)), batch).step_time_s[0]
    assert after <= before * (1 + 1e-9)


def check_sums(node: Breakdown) -> None:
    """Every parent is the sum or the maximum of its children."""
    for part in walk(node):
        values = [child.value for child in part.children]
        if part.combine == "sum":
            assert part.value == pytest.approx(sum(values), rel=1e-9, abs=1e-9), part.name
        elif part.combine == "max":
            assert part.value == max(values), part.name
        else:
            assert not values


@given(plan=any_plan())
@settings(FEW, max_examples=200)
def test_trees_add_up_to_the_evaluation(plan: tuple[CostContext, StrategyBatch]) -> None:
    """Time and memory trees are consistent inside, and their roots are what the search evaluates."""
    context, batch = plan
    answer, fast = estimate(context, batch), evaluate(context, batch)
    for tree in (answer.time, answer.memory):
        check_sums(tree)
    assert answer.time.value == pytest.approx(fast.step_time_s[0], rel=1e-9)
    assert answer.memory.value == pytest.approx(fast.peak_memory_bytes[0], rel=1e-9)
    assert answer.step_time_s == fast.step_time_s[0]
    assert answer.fits == fast.fits[0]


@given(plan=any_plan())
@settings(FEW, max_examples=200)
def test_no_traffic_where_nothing_is_split(plan: tuple[CostContext, StrategyBatch]) -> None:
    """A degree of one has no traffic and one stage no bubble."""
    context, batch = plan
    # Leaves found by subtraction may keep a rounding error of 1e-17 s.
    found = {node.name for node in walk(estimate(context, batch).time) if abs(node.value) > 1e-12}
    for degree, term in (("cp", "context-parallel traffic"), ("ep", "expert-parallel traffic")):
        if getattr(batch, degree)[0] == 1:
            assert term not in found
    if batch.tp[0] == 1 and batch.etp[0] == 1:
        assert not {"tensor-parallel traffic", "embedding traffic", "head traffic"} & found
    if batch.pp[0] == 1:
        assert not {"pipeline bubble", "stage-to-stage traffic"} & found
    # Without data parallelism experts still have replicas where tensor ranks outnumber their shards.
    experts = batch.tp[0] * batch.cp[0] * batch.dp[0] // (batch.etp[0] * batch.ep[0])
    alone = batch.dp[0] * batch.cp[0] == 1 and (context.model.moe is None or experts == 1)
    # Offloaded weights cross the host link whoever else holds them.
    if alone and not batch.offload_parameters[0]:
        assert not {"exposed gradient traffic", "parameter and gradient traffic"} & found


@pytest.mark.parametrize("name", sorted(BACKENDS))
@given(plan=st.data())
@FEW
def test_batch_of_many_equals_many_batches(name: str, plan: st.DataObject) -> None:
    """Rows do not influence each other."""
    context, groups = everything(name, plan.draw(st.sampled_from([m for backend, m in answered() if backend == name])))
    rng = np.random.default_rng(plan.draw(st.integers(0, 1000)))
    rows = [group.take(rng.integers(0, len(group), 2)) for group in groups[:4]]
    many = StrategyBatch.concatenate(rows)
    together = evaluate(context, many)
    for i in range(len(many)):
        alone = evaluate(context, many.take(slice(i, i + 1)))
        for field in ("step_time_s", "peak_memory_bytes", "host_memory_bytes_per_node"):
            assert getattr(alone, field)[0] == pytest.approx(getattr(together, field)[i], rel=1e-12)
        assert alone.fits[0] == together.fits[i]


@pytest.mark.parametrize("name", sorted(BACKENDS))
@given(shard=st.sampled_from([2, 4, 8, 64, 1024]), precision=st.sampled_from(["bf16", "fp16", "fp32"]))
@FEW
def test_states_shrink_with_the_zero_stage(name: str, shard: int, precision: str) -> None:
    """From the first sharded stage on, a higher stage never holds more, and more GPUs never hold more each."""
    context = question(backend=name, precision=precision)

    def held(stage: int, degree: int) -> float:
        batch = step_of(context, zero_stage=stage, shard_degree=degree).work.batch
        states = context.backend.state_bytes(context.job, batch, np.array([degree]))
        return float((states.weights + states.gradients + states.optimizer + states.step_temporary)[0])

    stages = [stage for stage in context.backend.zero_stages if stage]
    totals = [held(stage, shard) for stage in stages]
    assert totals == sorted(totals, reverse=True)
    for stage in stages:
        assert held(stage, 2 * shard) < held(stage, shard)
    unsharded = held(0, 1)
    # DeepSpeed's stage 1 adds an fp32 accumulation buffer of 4 bytes, which two GPUs' worth of sharding outweighs.
    assert all(total <= unsharded for total in totals)


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("model", MODELS)
def test_recomputation_trades_time_for_memory(name: str, model: str) -> None:
    """Every kind keeps no more than none and takes no less time; full keeps the least and takes longest."""
    context = question(model, machines("h100", GPUS), name, seq_len=4096, global_batch=64)
    steps = {kind.id: step_of(context, recompute=kind.id) for kind in context.recompute_kinds}
    kept = {kind: (step.activation_bytes - step.recompute_saved_bytes)[0, 0] for kind, step in steps.items()}
    added = {kind: step.recompute_time_s[0, 0] for kind, step in steps.items()}
    assert kept["none"] == max(kept.values())
    assert kept["full"] == min(kept.values())
    assert added["none"] == 0.0
    assert all(seconds >= 0.0 for seconds in added.values())
    assert added["full"] == max(added.values())


@pytest.mark.parametrize("name", sorted(BACKENDS))
@given(size=st.sampled_from([1, 2, 4]), stage=st.sampled_from([1, 2, 3]), model=st.sampled_from(MODELS))
@FEW
def test_memory_grows_with_the_micro_batch(name: str, size: int, stage: int, model: str) -> None:
    """Twice the micro-batch never needs less memory."""
    context = question(model, machines("h100", GPUS), name, global_batch=256)
    stage = stage if stage in context.backend.zero_stages else context.backend.zero_stages[-1]
    small, large = (priced(context, zero_stage=stage, micro_batch=b).peak_memory_bytes[0] for b in (size, 2 * size))
    assert large > small


def test_splitting_shows_its_traffic() -> None:
    """The terms that must vanish without splitting do appear with it."""
    dense = question("llama-3-8b", machines("h100", GPUS), seq_len=2048, global_batch=32)
    mixture = question("mixtral-8x7b", machines("h100", GPUS), seq_len=2048, global_batch=32)
    assert "tensor-parallel traffic" in names(estimated(dense, tp=2).time)
    assert "context-parallel traffic" in names(estimated(dense, cp=16).time)
    assert {"pipeline bubble", "stage-to-stage traffic"} <= names(estimated(dense, pp=2).time)
    assert "expert-parallel traffic" in names(estimated(mixture, ep=8, zero_stage=1).time)
