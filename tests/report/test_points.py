"""The scatter: every plan of a document once, in its order, and the frontier of time and memory."""

from __future__ import annotations

from planner.report.figures.points import points
from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.plan import Plan, PlanDocument

DOCUMENT = estimate(
    "llama-3.1-70b", ClusterInput(gpu="h100", gpus=64), JobInput(seq_len=4096, global_batch=256), StrategyInput(tp=8)
)


def plan(step: float, memory: float, *, backend: str = "megatron", micro_batch: int = 1) -> Plan:
    """A plan with these figures; ``micro_batch`` tells strategies apart."""
    found = DOCUMENT.best.estimate.model_copy(update={"step_time_s": step, "peak_memory_bytes": memory})
    strategy = DOCUMENT.best.strategy.model_copy(update={"micro_batch": micro_batch})
    return Plan(backend=backend, strategy=strategy, estimate=found)


def document(best: Plan, *others: Plan, **by_backend: Plan | None) -> PlanDocument:
    return DOCUMENT.model_copy(update={"best": best, "alternatives": others, "by_backend": by_backend})


def test_the_frontier_has_what_nothing_beats() -> None:
    """Faster or smaller than every other plan; equal plans do not push each other off."""
    fast, small = plan(1.0, 9.0), plan(3.0, 2.0, micro_batch=2)
    beaten, middle, twin = plan(3.0, 9.0, micro_batch=3), plan(2.0, 5.0, micro_batch=4), plan(2.0, 5.0, micro_batch=5)
    found = points(document(fast, small, beaten, middle, twin))
    assert [point.on_frontier for point in found] == [True, True, False, True, True]
    assert [point.rank for point in found] == [1, 2, 3, 4, 5]


def test_the_best_of_a_framework_is_one_point() -> None:
    """The best plan is also its framework's, frameworks without a plan have no point, the same strategy in another
    framework is another plan."""
    best, other = plan(1.0, 9.0), plan(2.0, 8.0, backend="torchtitan")
    found = points(document(best, plan(1.5, 8.0, micro_batch=2), megatron=best, fsdp=None, torchtitan=other))
    assert [(point.rank, point.backend) for point in found] == [(1, "megatron"), (2, "megatron"), (3, "torchtitan")]


def test_labels_name_the_mesh() -> None:
    assert points(DOCUMENT)[0].label == "TP 8 + SP, DP 8, ZeRO 1"
