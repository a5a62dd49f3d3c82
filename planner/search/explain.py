"""What limits a plan and what its neighbours would do: sentences for people, from the same coefficients as the search.

The comparison with other meshes term by term works on documents and stands with them; here every neighbour is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from planner.cost.evaluate import CostContext, evaluate, layer_counts, recomputed_counts, stage_model
from planner.cost.stage_model import assemble
from planner.search.legality import refusals
from planner.specs.batch import DEVICES, EVERY_LAYER, StrategyBatch
from planner.units import gib, percent

NEIGHBOURS = 3
"""Neighbouring choices that are described: other micro-batches first, then other recomputation."""

TIGHT_SHARE = 0.05
"""Headroom below this share of the limit is called binding."""


def explain(context: CostContext, plan: StrategyBatch) -> tuple[str, ...]:
    """Binding resource and what the neighbouring choices would do, for a batch of one."""
    return (_memory(context, plan), *islice(_neighbours(context, plan), NEIGHBOURS))


def _memory(context: CostContext, plan: StrategyBatch) -> str:
    result = assemble(
        stage_model(context, plan),
        layer_counts(context, plan),
        recomputed_counts(context, plan),
        plan.offload_optimizer,
    )
    needed = float(result.peak_memory_bytes[0]) * context.memory_upper
    rank, limit = int(result.rank_memory_bytes[0].argmax()), context.memory_limit_bytes
    place = f"pipeline rank {rank}" if int(plan.pp[0]) > 1 else "every GPU"
    head = f"memory: {place} needs up to {gib(needed)} of {gib(limit)}"
    spare = limit - needed
    return f"{head}; memory binds" if spare < TIGHT_SHARE * limit else f"{head}, {gib(spare)} to spare"


def _neighbours(context: CostContext, plan: StrategyBatch) -> Iterator[str]:
    """One sentence for every neighbour that is legal: slower by how much, or short of memory by how much."""
    base = float(evaluate(context, plan).step_time_s[0])
    for name, neighbour in _variants(context, plan):
        if not refusals(context, neighbour):
            prices = evaluate(context, neighbour)
            needed = float(prices.peak_memory_bytes[0]) * context.memory_upper
            time_s = float(prices.step_time_s[0])
            slower = time_s >= base
            change = f"{percent(abs(time_s / base - 1))} {'slower' if slower else 'faster'}"
            join = "and" if slower else "but"
            if prices.fits[0]:
                yield f"{name}: {change}"
            elif needed > context.memory_limit_bytes:
                yield f"{name}: {change}, {join} {gib(needed - context.memory_limit_bytes)} over the memory limit"
            else:
                yield f"{name}: {change}, {join} over the host memory limit"


def _variants(context: CostContext, plan: StrategyBatch) -> Iterator[tuple[str, StrategyBatch]]:
    size = int(plan.micro_batch[0])
    for other in (size * 2, size // 2):
        if other >= 1 and context.job.global_batch % (other * int(plan.dp[0])) == 0:
            yield f"micro-batch {other}", plan.with_values(micro_batch=other)
    for index, kind in enumerate(context.recompute_kinds):
        if index != int(plan.recompute_kind[0]):
            most = 0 if kind.mode == "none" else EVERY_LAYER
            yield f"recompute {kind.id}", plan.with_values(recompute_kind=index, recompute_layers=most)
    if int(plan.offload_device[0]):
        none = {"offload_optimizer": 0.0, "offload_device": 0, "offload_parameters": DEVICES.index("none")}
        yield "no offload", plan.with_values(**none)
