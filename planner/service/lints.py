"""What runs but is not what its author wanted: findings that only the priced configuration shows.

Each is a comparison of figures that the estimate or a single change already gave; thresholds stand here with their
reason."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.context import CostContext
from planner.service.parts import time_parts
from planner.specs.check import Improvement, instruction
from planner.specs.finding import Finding
from planner.specs.plan import Plan
from planner.specs.strategy import Strategy
from planner.units import percent

LARGE_BUBBLE = 0.2
"""Share of the step lost to the pipeline's filling and draining; four micro-batches a stage lose less."""
NOTICEABLE = 0.02
"""Share of the step from which a waste is a warning; less is hard to measure."""
MUCH_TRAFFIC = 0.3
"""Share of the step that one kind of communication costs beyond what it hides."""


TRAFFIC = {
    "tensor-parallel traffic": "lower tp, or keep its ranks on faster links",
    "expert-parallel traffic": "lower ep, or keep its ranks on faster links",
    "parameter and gradient traffic": "more tokens for the same traffic (larger micro-batch, accumulation or global "
    "batch), or a lower ZeRO stage where it fits",
}
"""Part of the step -> what shrinks it."""
NOT_NEEDED = ("recompute-not-needed", "sharding-not-needed", "offload-not-needed")
"""Findings that say what a single change says: they cost what the estimate has in it already."""


def lints(context: CostContext, strategy: Strategy, plan: Plan | None, changes: Sequence[Improvement]) -> list[Finding]:
    """Findings of a strategy, its estimate and what single changes bring."""
    found = [*_from_degrees(context, strategy), *_from_estimate(strategy, plan)]
    # Several changes may say the same; the best of them stands first and is kept.
    kept: dict[str, Finding] = {}
    for finding in _from_changes(strategy, changes):
        kept.setdefault(finding.id, finding)
    return [*found, *kept.values()]


def _from_degrees(context: CostContext, strategy: Strategy) -> list[Finding]:
    found = []
    domain = context.cluster.ranks_per_domain
    if strategy.tp > domain:
        found.append(
            Finding(
                id="tp-leaves-domain",
                severity="warning",
                message="tensor parallelism crosses the network: every layer waits for it several times",
                got=f"tp({strategy.tp}) > {domain} GPUs on the fast links",
                allowed=f"tp up to {domain}",
                hint="lower tp and raise pp or the sharding",
            )
        )
    if strategy.tp > 1 and not strategy.sequence_parallel and True in context.backend.sequence_parallel_choices:
        found.append(
            Finding(
                id="sequence-parallel-off",
                severity="warning",
                message="norms and residuals are repeated on every tensor-parallel rank: more memory for the same time",
                got=f"tp({strategy.tp}) without sequence parallelism",
                hint="switch sequence parallelism on",
            )
        )
    if strategy.zero_stage > 0 and strategy.dp * strategy.cp == 1 and strategy.offload.device == "none":
        found.append(
            Finding(
                id="zero-shards-nothing",
                severity="warning" if strategy.zero_stage > 1 else "note",
                message=f"ZeRO {strategy.zero_stage} over one data-parallel rank shards nothing: the whole of weights, "
                "gradients and optimizer stays on every GPU of the model",
                got="dp(1) * cp(1)",
                allowed="dp * cp of 2 or more",
                hint="add GPUs (replicas), or offload the optimizer",
            )
        )
    if context.job.precision == "fp32" and context.cluster.accelerator.peak.bf16 is not None:
        found.append(
            Finding(
                id="fp32-training",
                severity="warning",
                message=f"training in fp32: {context.cluster.accelerator.id} computes bf16 several times as fast",
                hint="switch bf16 on",
            )
        )
    return found


def _from_estimate(strategy: Strategy, plan: Plan | None) -> list[Finding]:
    if plan is None:
        return []
    step, parts, found = plan.estimate.step_time_s, time_parts(plan), []
    bubble = parts.get("pipeline bubble", 0.0) / step
    if bubble > LARGE_BUBBLE:
        found.append(
            Finding(
                id="large-bubble",
                severity="warning",
                message=f"{percent(bubble)} of the step the pipeline is filling or draining",
                got=f"{strategy.grad_accum} micro-batches through pp({strategy.pp}) * vpp({strategy.vpp}) stages",
                hint=f"at least {4 * strategy.pp} micro-batches: a smaller micro-batch, a larger batch or fewer stages",
            )
        )
    for name, hint in TRAFFIC.items():
        share = parts.get(name, 0.0) / step
        if share > MUCH_TRAFFIC:
            found.append(
                Finding(
                    id="much-traffic",
                    severity="warning",
                    message=f"{percent(share)} of the step is {name}",
                    hint=hint,
                )
            )
    return found


def _from_changes(strategy: Strategy, changes: Sequence[Improvement]) -> list[Finding]:
    """Recomputation, sharding and offload that the memory does not ask for."""
    found = []
    for change in changes:
        new = change.plan.strategy
        if change.step_time_change is None or change.step_time_change >= 0.0:
            continue
        rank = {"none": 0, "selective": 1, "full": 2}
        names = {text.split(" ", 1)[0] for text in change.change}
        if names <= {"recompute", "layers_per_stage"} and rank[new.recompute.mode] < rank[strategy.recompute.mode]:
            found.append(_not_needed("recompute", f"{strategy.recompute.mode} recomputation", change.change[0], change))
        if names <= {"zero_stage", "secondary_shard_degree"} and new.zero_stage < strategy.zero_stage:
            plain = "plain data parallelism" if new.zero_stage == 0 else f"ZeRO {new.zero_stage}"
            found.append(_not_needed("sharding", f"ZeRO {strategy.zero_stage}", plain, change))
        if names <= {"offload", "layers_per_stage"} and new.offload.optimizer < strategy.offload.optimizer:
            found.append(_not_needed("offload", "so much offload", change.change[0], change))
    return found


def _not_needed(name: str, what: str, instead: str, change: Improvement) -> Finding:
    gain = -(change.step_time_change or 0.0)
    return Finding(
        id=f"{name}-not-needed",
        severity="warning" if gain >= NOTICEABLE else "note",
        message=f"{what} is not needed: {instead} fits and is {percent(gain)} faster",
        hint=instruction(change.settings),
    )
