"""The measured anchor: Llama-3-70B on 128 H100 as NVIDIA ran it, and the plan that the search finds for the same job.

Published (NVIDIA dgxc-benchmarking, release 25.04, NeMo, bf16): TP 4, PP 4, CP 2, VPP 5, DP 4, micro-batch 1, global
batch 256, sequence 8192: 14.67 s a step, 1,117 tokens/s/GPU."""

from __future__ import annotations

import pytest

from planner.service import ClusterInput, JobInput, PlanRequest, StrategyInput, estimate, suggest
from planner.specs.plan import Plan

MEASURED_STEP_S = 14.67
MEASURED_TOKENS_PER_S_PER_GPU = 1117
REQUEST = PlanRequest(
    model="llama-3-70b",
    cluster=ClusterInput(gpu="h100", gpus=128),
    job=JobInput(seq_len=8192, global_batch=256, precision="bf16"),
    backend="megatron",
)


def _published() -> Plan:
    """The run's own strategy, estimated."""
    run = StrategyInput(tp=4, pp=4, cp=2, vpp=5, micro_batch=1)
    return estimate(REQUEST.model, REQUEST.cluster, REQUEST.job, run, backend=REQUEST.backend).best


def test_estimate_of_the_published_run() -> None:
    """The run's own strategy is estimated within 10 % of its measured step time and speed, and it fits."""
    plan = _published()
    assert plan.strategy.dp == 4
    assert plan.estimate.fits
    assert plan.estimate.step_time_s == pytest.approx(MEASURED_STEP_S, rel=0.10)
    assert plan.estimate.tokens_per_s_per_gpu == pytest.approx(MEASURED_TOKENS_PER_S_PER_GPU, rel=0.10)


def test_suggested_plan_is_at_least_as_fast() -> None:
    """The search's plan for the same job is estimated no slower, fits, and keeps tensor parallelism inside the
    node."""
    published = _published().estimate
    found = suggest(REQUEST)
    assert found.search.status == "optimal"
    assert found.best.estimate.fits
    assert found.best.estimate.step_time_s <= published.step_time_s
    assert 2 <= found.best.strategy.tp <= 8
    assert found.best.strategy.zero_stage == 1
    assert found.best.strategy.recompute.mode != "full"
