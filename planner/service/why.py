"""Why a plan is what it is: where its time goes, what its memory savers buy, and why the next meshes lose.

Compares documents and prices variants of the plan; it never changes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.evaluate import CostContext, evaluate
from planner.search.explain import explain
from planner.service.parts import losses, part_kind, seconds_by_kind, time_parts
from planner.service.words import mesh_words
from planner.specs.batch import StrategyBatch
from planner.specs.plan import Plan
from planner.units import duration, gib, percent

RUNNERS_UP = 2
NOTABLE_SHARE = 0.002
"""A part of the step counts as a difference from this share of the step on."""


def why_best(context: CostContext, row: StrategyBatch, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Sentences about ``plans[0]`` (its batch row is ``row``) against the ones ranked behind it."""
    best = plans[0]
    return (
        where_time_goes(best),
        *explain(context, row),
        *_what_recompute_buys(context, row),
        *_what_sharding_buys(context, row),
        *(why_next(best, other) for other in plans[1 : 1 + RUNNERS_UP]),
    )


SHORT_NAMES = {
    "tensor-parallel traffic": "TP traffic",
    "context-parallel traffic": "CP traffic",
    "expert-parallel traffic": "EP traffic",
    "parameter and gradient traffic": "sharding",
    "stage-to-stage traffic": "PP traffic",
    "exposed gradient traffic": "gradients",
    "pipeline bubble": "bubble",
    "waiting for the slowest GPU": "stragglers",
    "kernel launches": "launches",
    "recomputation": "recompute",
    "host optimizer": "offload",
}
"""Parts of a step whose names are too long for a column of a table."""
MOST_LOSSES = 4
"""Named in a sentence."""


def largest_loss(plan: Plan) -> tuple[str, float]:
    """Short name and share of the largest part of the step that is not arithmetic."""
    name, seconds = next(iter(losses(plan).items()), ("", 0.0))
    share = seconds / plan.estimate.step_time_s
    return (SHORT_NAMES.get(name, name), share) if share >= NOTABLE_SHARE else ("none", 0.0)


def where_time_goes(plan: Plan) -> str:
    """Arithmetic, the largest losses and what is left: shares that add up to the step."""
    total = plan.estimate.time.value
    lost = losses(plan)
    named = [(name, value) for name, value in lost.items() if abs(value) >= NOTABLE_SHARE * total][:MOST_LOSSES]
    rest = sum(lost.values()) - sum(value for _, value in named)
    if abs(rest) >= NOTABLE_SHARE * total:
        named.append(("all else", rest))
    arithmetic = percent(seconds_by_kind(plan).get("arithmetic", 0.0) / total)
    shares = [f"{name} {percent(value / total)}" for name, value in named]
    return ", ".join([f"{arithmetic} of the step is the model's arithmetic", *shares])


def _needs(context: CostContext, row: StrategyBatch) -> tuple[float, bool]:
    """(upper end of the memory need, whether it fits)."""
    priced = evaluate(context, row)
    return float(priced.peak_memory_bytes[0]) * context.memory_upper, bool(priced.fits[0])


def _what_recompute_buys(context: CostContext, row: StrategyBatch) -> list[str]:
    kind = context.recompute_kinds[int(row.recompute_kind[0])]
    if kind.mode == "none":
        return []
    none = next(i for i, choice in enumerate(context.recompute_kinds) if choice.mode == "none")
    needed, fit = _needs(context, row.with_values(recompute_kind=none, recompute_layers=0))
    if fit:
        return []
    return [
        f"recompute {kind.id}: without it a GPU would need up to {gib(needed)} of {gib(context.memory_limit_bytes)}"
    ]


def _what_sharding_buys(context: CostContext, row: StrategyBatch) -> list[str]:
    stage = int(row.zero_stage[0])
    if stage == 0 or 0 not in context.backend.zero_stages or float(row.offload_optimizer[0]) > 0:
        return []
    needed, fit = _needs(context, row.with_values(zero_stage=0, shard_degree=1, secondary_shard_degree=0))
    if fit:
        return []
    return [f"ZeRO {stage}: without sharding a GPU would need up to {gib(needed)} of {gib(context.memory_limit_bytes)}"]


def why_next(best: Plan, other: Plan) -> str:
    """One sentence on a plan ranked behind: how much slower, and which part of the step makes the difference."""
    step, slower = best.estimate.step_time_s, other.estimate.step_time_s
    head = f"next, {mesh_words(other.strategy)}: {duration(slower)}, {percent(abs(slower / step - 1))} "
    head += "slower" if slower >= step else "faster but with more memory"
    mine, theirs = time_parts(best), time_parts(other)
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in (*mine, *theirs)}
    name, seconds = max(more.items(), key=lambda item: item[1])
    if seconds <= NOTABLE_SHARE * step:
        return head
    # The parts are those of the slowest stage: arithmetic that grows by more than the step belongs to another stage.
    moved = part_kind(name) == "arithmetic" and seconds > slower - step and max(best.strategy.pp, other.strategy.pp) > 1
    return head + f" ({'another stage is the slowest: ' if moved else ''}{name} +{duration(seconds)})"
