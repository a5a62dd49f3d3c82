"""A plan document in words: verdict, speed, memory, assumptions and search, said once for terminal, page and report.

Sentences only; the table of the ranked plans is in ``planner.service.ranking``."""

from __future__ import annotations

from collections.abc import Sequence

from planner.service.words import strategy_text
from planner.specs.cluster import Cluster
from planner.specs.plan import Assumption, Estimate, Plan, PlanDocument, SearchReport
from planner.units import duration, gib, percent


def headline(document: PlanDocument) -> str:
    """Model and machines: ``llama-3.1-70b on 128 x h100-sxm-80gb``."""
    request = document.request
    return f"{request.model.name} on {request.cluster.gpus} x {request.cluster.accelerator.id}"


def speed_text(estimate: Estimate) -> str:
    """Step time with its range, tokens, MFU, and the price where one is known."""
    low, high = estimate.step_time_range_s
    text = (
        f"est. {duration(estimate.step_time_s)} a step ({duration(low)} to {duration(high)}), "
        f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {percent(estimate.mfu)}"
    )
    if estimate.cost_per_million_tokens is not None:
        text += f", ${estimate.cost_per_million_tokens:.3g} per million tokens"
    return text


def memory_text(estimate: Estimate) -> str:
    """Peak memory, the upper end of its range, and the limit."""
    return (
        f"est. {gib(estimate.peak_memory_bytes)} peak memory (up to {gib(estimate.peak_memory_range_bytes[1])}) "
        f"of {gib(estimate.memory_limit_bytes)}"
    )


def basis_text(estimate: Estimate) -> str:
    """What the ranges rest on: whose errors they are wide enough for."""
    return f"ranges cover the errors of measured runs; {estimate.range_basis}"


def misfit_text(estimate: Estimate) -> str:
    """What is too much of a plan that does not fit."""
    over = estimate.peak_memory_range_bytes[1] - estimate.memory_limit_bytes
    if over > 0:
        return f"{gib(over)} too much"
    return f"host memory {gib(estimate.host_memory_bytes_per_node)} a node"


def host_text(plan: Plan, cluster: Cluster) -> str | None:
    """Host memory of a node; None where nothing is offloaded."""
    offload = plan.strategy.offload
    if offload.device == "none" and offload.parameters == "none":
        return None
    needed, there = plan.estimate.host_memory_bytes_per_node, cluster.host_memory_bytes_per_node
    return f"host memory of a node: {gib(needed)} of {gib(there)}"


def best_of_others(document: PlanDocument) -> tuple[str, ...]:
    """A line for each compared framework whose best plan is not among the ranked ones."""
    ranked = (document.best, *document.alternatives)
    lines = []
    for backend, plan in document.by_backend.items():
        if plan is None:
            lines.append(f"{backend}: nothing fits")
        elif plan not in ranked:
            strategy = strategy_text(plan).removeprefix(backend + ": ")
            lines.append(f"best of {backend}: {duration(plan.estimate.step_time_s)}, {strategy}")
    return tuple(lines)


def assumption_lines(assumptions: Sequence[Assumption]) -> list[str]:
    """One line a reason: what came from the same place stands together."""
    by_reason: dict[str, list[str]] = {}
    for assumption in assumptions:
        value = assumption.value
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        by_reason.setdefault(assumption.why, []).append(f"{assumption.field.rsplit('.', 1)[-1]} = {shown}")
    return [f"{', '.join(values)}: {why}" for why, values in by_reason.items()]


def search_text(report: SearchReport) -> str:
    """How many candidates were looked at, and how far the answer can be from the best."""
    rejected = sum(report.rejected.values())
    proof = "proven optimal" if report.status == "optimal" else "not proven optimal"
    if report.gap:
        proof += f", at most {percent(report.gap)} from the best"
    return (
        f"{report.candidates:,} candidates, {rejected:,} rejections by rules, "
        f"{report.solved} solved exactly, {duration(report.seconds)}; {proof} within the cost model."
    )
