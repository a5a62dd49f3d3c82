"""The full answer for one strategy: speed, memory, ranges, cost and the trees behind them."""

from __future__ import annotations

from planner.cost.breakdown import memory_tree, time_tree
from planner.cost.context import CostContext, Work
from planner.cost.evaluate import fits, layer_counts, recomputed_counts
from planner.cost.flops import model_flops_per_token
from planner.cost.stage_model import assemble
from planner.cost.step import Step
from planner.errors import InputError
from planner.specs.batch import StrategyBatch
from planner.specs.plan import Estimate

_SECONDS_PER_HOUR = 3600.0


def estimate(context: CostContext, batch: StrategyBatch) -> Estimate:
    """Evaluate a batch of one with the code that the search uses, and keep the trees."""
    if len(batch) != 1:
        raise ValueError(f"estimate takes one strategy, got {len(batch)}")
    step = Step(Work(context, batch), int(batch.pp[0]))
    counts = layer_counts(context, batch), recomputed_counts(context, batch)
    offload = float(batch.offload_optimizer[0])
    result = assemble(step.model, *counts, batch.offload_optimizer)
    layers, recomputed = (count.sum(axis=1) for count in counts)
    seconds, memory = float(result.step_time_s[0]), float(result.peak_memory_bytes[0])
    job, cluster, spread = context.job, context.cluster, context.uncertainty
    tokens = float(job.global_batch) * job.seq_len
    flops = (
        model_flops_per_token(context.model, job.attended_tokens, frozen=job.frozen) * tokens / seconds / cluster.gpus
    )
    return Estimate(
        step_time_s=seconds,
        step_time_range_s=(seconds * spread.step_time_lower, seconds * spread.step_time_upper),
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_gpu=tokens / seconds / cluster.gpus,
        model_flops_per_s_per_gpu=flops,
        mfu=flops / mfu_peak(context),
        peak_memory_bytes=memory,
        peak_memory_range_bytes=(memory * spread.memory_lower, memory * spread.memory_upper),
        range_basis=spread.basis,
        memory_limit_bytes=context.memory_limit_bytes,
        fits=bool(fits(context, result)[0]),
        host_memory_bytes_per_node=float(result.host_memory_bytes_per_node[0]),
        memory=memory_tree(step, layers, recomputed, offload),
        time=time_tree(step, result, layers, recomputed, offload),
        cost_per_million_tokens=_cost(context, seconds, tokens),
    )


def mfu_peak(context: CostContext) -> float:
    """The dense peak behind MFU: of the narrow format for fp8 and nvfp4 jobs, of the job's own format otherwise."""
    peaks = context.cluster.accelerator.peak
    if context.job.narrow:
        peak = peaks.fp8 if context.job.precision == "fp8" else peaks.fp4
        if peak is None:
            precision = context.job.precision
            raise InputError(
                f"{context.cluster.accelerator.id} has no {precision} matrix rate",
                where="precision",
                got=precision,
                hint="use another --precision",
            )
        return peak
    return context.dense_flops_per_s


def _cost(context: CostContext, seconds: float, tokens: float) -> float | None:
    price = context.cluster.usd_per_gpu_hour
    if price is None:
        return None
    return price * context.cluster.gpus * seconds / _SECONDS_PER_HOUR / tokens * 1e6
