"""Plan documents that reports are made of: with and without pipeline and experts, fitting or not, and hostile names."""

from __future__ import annotations

from functools import cache

from planner.service import ClusterInput, JobInput, PlanRequest, StrategyInput, estimate, suggest
from planner.specs.plan import Assumption, PlanDocument

HOSTILE = "a|b</script><script>alert(1)</script><!-- `x` *y* [z](http://evil.example/) @team #1 & \"q\" 'r' \u2028 $m$"
"""A name that would break out of JSON, HTML, Markdown tables and plain text."""


@cache
def searched() -> PlanDocument:
    """Frameworks compared; the best plan needs no pipeline."""
    cluster = ClusterInput(gpu="h100", gpus=16)
    job = JobInput(seq_len=4096, global_batch=64)
    return suggest(PlanRequest(model="llama-3.1-8b", cluster=cluster, job=job))


@cache
def piped() -> PlanDocument:
    """A pipeline of four stages."""
    cluster = ClusterInput(gpu="h100", gpus=64)
    job = JobInput(seq_len=4096, global_batch=64)
    return estimate("llama-3.1-70b", cluster, job, StrategyInput(tp=8, pp=4))


@cache
def interleaved() -> PlanDocument:
    """Sixteen stages of six chunks on 16,384 GPUs."""
    cluster = ClusterInput(gpu="h100", gpus=16384)
    return estimate("gpt3-175b", cluster, JobInput(global_batch=6144), StrategyInput(tp=8, pp=16, vpp=6))


@cache
def experts() -> PlanDocument:
    """Two rank grids: one of the experts, one of everything else."""
    cluster = ClusterInput(gpu="h100", gpus=64)
    job = JobInput(seq_len=4096, global_batch=256)
    return estimate("mixtral-8x7b", cluster, job, StrategyInput(tp=2, pp=4, ep=8))


@cache
def alone() -> PlanDocument:
    """One GPU: no groups, no traffic."""
    job = JobInput(seq_len=1024, global_batch=8)
    return estimate("gpt2-124m", ClusterInput(gpu="a100", gpus=1), job, StrategyInput())


@cache
def too_large() -> PlanDocument:
    """A plan that does not fit."""
    job = JobInput(seq_len=4096, global_batch=64)
    return estimate("llama-3.1-70b", ClusterInput(gpu="h100", gpus=8), job, StrategyInput(tp=8))


@cache
def hostile() -> PlanDocument:
    """Names, warnings, reasons and assumptions that carry markup."""
    document = searched()
    request = document.request
    model = request.model.model_copy(update={"name": HOSTILE})
    return document.model_copy(
        update={
            "request": request.model_copy(update={"model": model}),
            "warnings": (HOSTILE,),
            "assumptions": (Assumption(field="model", value=HOSTILE, why=HOSTILE),),
            "best": document.best.model_copy(update={"why": (HOSTILE,)}),
        }
    )


CASES = {case.__name__: case for case in (searched, piped, interleaved, experts, alone, too_large, hostile)}
