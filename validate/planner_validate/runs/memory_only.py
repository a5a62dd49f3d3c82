"""Memory of a plan's ranks without any of its devices: the first, a middle and the last pipeline stage, traced with
fake tensors on this machine's processor and compared term by term with the estimate.

What it sees is every tensor of a rank; what it cannot see is the allocator of a GPU, its context, and libraries that
allocate for themselves."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import InputError
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Strategy
from planner.specs.validation import Comparison, RankFailure, RankResult, RunConfig, ValidationReport
from planner.units import counted
from planner_validate.reports.comparison import compare_memory_terms, report, worst_rank
from planner_validate.runs.devices import Probe, cores, this_machine
from planner_validate.runs.launching import Folder, launch, torchrun
from planner_validate.runs.options import Options, Progress
from planner_validate.runs.plans import Prepared, prepared

PATIENCE_S = 3600.0
"""Longest phase of one rank: a whole step of a large model is one."""
TWO = 2
"""Micro-batches after which a step without a pipeline repeats itself: gradients are there from the second one on."""


def run(
    document: PlanDocument,
    options: Options,
    progress: Progress | None = None,
    *,
    probe: Probe = this_machine,
) -> ValidationReport:
    """Trace ranks of the plan and compare; MissingExtraError where torch is not there, InputError where the runner
    cannot build the plan."""
    found = prepared(document, options)
    probe()
    strategy = found.document.best.strategy
    ranks = observed_ranks(strategy)
    config = traced(found)
    if progress is not None:
        progress(f"tracing {counted(len(ranks), 'rank')} of {found.gpus}")

    def command(folder: Folder, processes: int) -> list[str]:
        named = ",".join(map(str, ranks))
        return torchrun(folder, processes, ("-m", "planner_validate.trainer.fake_rank", "--ranks", named))

    launched = launch(config, len(ranks), progress, command=command)
    failures = [_of_plan(failure, ranks) for failure in launched.failures]
    made = report(found, launched.results, failures, mode="memory-only", notes=notes(strategy, config.strategy, ranks))
    return made.model_copy(update={"memory_terms": made.memory_terms + other_stages(found, launched.results)})


def observed_ranks(strategy: Strategy) -> tuple[int, ...]:
    """Rank 0 of the first, the middle and the last pipeline stage: ranks of one stage differ by rounding only."""
    stages = sorted({0, strategy.pp // 2, strategy.pp - 1})
    return tuple(stage * strategy.tp * strategy.cp * strategy.dp for stage in stages)


def enough_micro_batches(strategy: Strategy) -> int:
    """The fewest micro-batches of a step that reach its peak: gradients are there and the schedule is full."""
    if strategy.pp == 1:
        return min(strategy.grad_accum, TWO)
    if strategy.pipeline_schedule == "gpipe":
        return strategy.grad_accum
    full = 2 * strategy.pp if strategy.vpp > 1 else strategy.pp + 1
    return min(strategy.grad_accum, full)


def traced(found: Prepared) -> RunConfig:
    """What each traced rank is told: the plan on processors, with as many micro-batches as its peak needs."""
    request, strategy = found.document.request, found.document.best.strategy
    if strategy.offload.device != "none" or strategy.offload.parameters != "none":
        raise InputError(
            "ranks with offload cannot be traced: that needs a GPU",
            where="--memory-only",
            got=f"offload to {strategy.offload.device}",
            allowed="no offload",
            hint="--proxy or the run itself measures them on GPUs",
        )
    count = enough_micro_batches(strategy)
    batch = count * strategy.micro_batch * strategy.dp
    return RunConfig(
        model=request.model,
        cluster=request.cluster,
        job=request.job.model_copy(update={"global_batch": batch}),
        strategy=strategy.model_copy(update={"grad_accum": count, "global_batch": batch}),
        device="cpu",
        warmup_steps=1,
        measured_steps=1,
        check_gradients=False,
        timeout_s=PATIENCE_S,
        threads=max(1, cores() // len(observed_ranks(strategy))),
    )


def _of_plan(failure: RankFailure, ranks: tuple[int, ...]) -> RankFailure:
    """A failure by the plan's number of its rank, not by the launcher's."""
    known = failure.rank is not None and failure.rank < len(ranks)
    return failure.model_copy(update={"rank": ranks[failure.rank]}) if known and failure.rank is not None else failure


def other_stages(found: Prepared, results: Sequence[RankResult]) -> tuple[Comparison, ...]:
    """Every term of the traced ranks that are not the fullest, each against its own stage."""
    fullest = worst_rank(results)
    return tuple(
        row.model_copy(update={"name": f"{row.name}, stage {result.coordinates['pp']}"})
        for result in results
        if result is not fullest
        for row in compare_memory_terms(found.estimate, [result])
    )


def notes(strategy: Strategy, shown: Strategy, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """What was traced and what that leaves out."""
    found = [
        f"nothing was allocated: rank {', '.join(map(str, ranks))} of {strategy.gpus}, each with the sizes of its own "
        "tensors under fake tensors; fragmentation, the device's context and libraries' own buffers are not seen",
    ]
    if shown.grad_accum < strategy.grad_accum:
        found.append(
            f"{shown.grad_accum} of {strategy.grad_accum} micro-batches were traced, after which the peak repeats "
            "itself; nothing was scaled"
        )
    return tuple(found)
