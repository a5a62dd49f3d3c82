"""One rank's work of a larger plan on one device, put together with the modelled waiting of the others.

Measured are the rank's own kernels, its optimizer and its memory, with the plan's shapes; modelled are the traffic
between ranks, the pipeline's bubble and the wait for the slowest rank, as the estimate has them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import InputError, MissingExtraError
from planner.specs.cluster import Cluster
from planner.specs.plan import Breakdown, Estimate, PlanDocument
from planner.specs.strategy import Strategy
from planner.specs.validation import Comparison, RankFailure, RankResult, RunConfig, ValidationReport
from planner.units import gib, percent
from planner_validate.reports.comparison import compare_peak, report, spread, verdict
from planner_validate.reports.suspects import memory_suspect
from planner_validate.reports.terms import OPTIMIZER, TRAFFIC, leaves, predicted_times, predicted_traffic, stage_of
from planner_validate.runs.devices import Probe, available_host_bytes, this_machine
from planner_validate.runs.launching import Folder, launch, torchrun
from planner_validate.runs.options import WARMUP_STEPS, Options, Progress
from planner_validate.runs.plans import PROCESS_BYTES, Prepared, device_of, prepared

WORK = "forward and backward, own work"
BUBBLE = "pipeline bubble"
SLOWEST = "waiting for the slowest GPU"
_STAGE = re.compile(r"stage (\d+) x ")


def run(
    document: PlanDocument,
    options: Options,
    progress: Progress | None = None,
    *,
    probe: Probe = this_machine,
) -> ValidationReport:
    """Run the rank that the estimate expects to be slowest; raises where this machine has no device for it."""
    found = prepared(document, options)
    strategy = found.document.best.strategy
    rank = slowest_rank(strategy, found.estimate)
    config = alone(found, options)
    _check_device(found, rank, probe)
    if progress is not None:
        progress(f"running rank {rank} of {found.gpus} alone")

    def command(folder: Folder, processes: int) -> list[str]:
        return torchrun(folder, processes, ("-m", "planner_validate.trainer.lone_rank", "--rank", str(rank)))

    launched = launch(config, 1, progress, command=command)
    failures = [failure.model_copy(update={"rank": rank}) for failure in launched.failures]
    return composed(found, launched.results, failures, rank)


def slowest_rank(strategy: Strategy, estimate: Estimate) -> int:
    """First rank of the pipeline stage that the estimate's step is made of."""
    stage = next((int(found[1]) for part in estimate.time.children if (found := _STAGE.match(part.name))), 0)
    return stage * strategy.tp * strategy.cp * strategy.dp


def alone(found: Prepared, options: Options) -> RunConfig:
    """What the rank is told: the plan as it is; there is nobody to compare gradients with."""
    request, strategy = found.document.request, found.document.best.strategy
    return RunConfig(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        strategy=strategy,
        device=device_of(found.document),
        warmup_steps=WARMUP_STEPS,
        measured_steps=options.measured_steps,
        check_gradients=False,
        timeout_s=options.timeout_s,
        threads=max(1, int(request.cluster.cores_per_rank)) if request.cluster.accelerator.synchronous else 1,
    )


def _check_device(found: Prepared, rank: int, probe: Probe) -> None:
    machine = probe()
    if device_of(found.document) == "cuda":
        if not machine.gpus:
            raise MissingExtraError(
                f"rank {rank} needs one {found.document.request.cluster.accelerator.id}, and torch {machine.torch} "
                "sees no GPU here",
                where="--proxy",
                hint="--memory-only measures the memory of ranks without a GPU",
            )
        return
    needed, there = PROCESS_BYTES + found.estimate.peak_memory_bytes, available_host_bytes()
    if there is not None and needed > there:
        raise InputError(
            f"one rank of the plan needs about {gib(needed)} of host memory",
            where="--proxy",
            got=f"{gib(there)} available",
            allowed="a plan whose ranks fit",
            hint="--memory-only allocates nothing",
        )


@dataclass(frozen=True)
class Parts:
    """A step in what was measured and what was not, seconds."""

    work_s: float
    optimizer_s: float
    predicted_work_s: float
    traffic_s: dict[str, float]
    """By kind of group, as the estimate has it."""
    bubble_s: float
    """The estimate's, as much longer as the work is."""
    predicted_bubble_s: float
    slowest_s: float

    @property
    def total_s(self) -> float:
        return self.work_s + self.optimizer_s + sum(self.traffic_s.values()) + self.bubble_s + self.slowest_s


def parts_of(tree: Breakdown, work_s: float, optimizer_s: float) -> Parts:
    """The step of a rank with measured work, by the estimate's tree of the step."""
    by_name = {child.name: child.value for child in tree.children}
    body = next(child for child in tree.children if child.name.endswith("micro-batches"))
    own = sum(part.value for part in leaves(body) if part.name not in TRAFFIC)
    bubble = by_name.get(BUBBLE, 0.0)
    return Parts(
        work_s=work_s,
        optimizer_s=optimizer_s,
        predicted_work_s=own,
        traffic_s={str(kind): value for kind, value in predicted_traffic(tree).items()},
        bubble_s=bubble * work_s / own if own else bubble,
        predicted_bubble_s=bubble,
        slowest_s=by_name.get(SLOWEST, 0.0),
    )


def composed(
    found: Prepared, results: Sequence[RankResult], failures: Sequence[RankFailure], rank: int
) -> ValidationReport:
    """The report of one rank: its step is put together from measured and modelled parts."""
    estimate, cluster = found.estimate, found.document.request.cluster
    base = report(found, results, failures, mode="proxy", notes=_notes(found, cluster, rank))
    if failures or not results or not results[0].steps:
        return base.model_copy(update={"step_time": None, "time_terms": (), "verdict": "failed"})
    (result,) = results
    shared = cluster.ranks_per_core
    work = [shared * step.forward_backward_s for step in result.steps]
    update = [shared * step.optimizer_s for step in result.steps]
    parts = parts_of(estimate.time, statistics.median(work), statistics.median(update))
    step = _step(estimate, parts, spread([one + other for one, other in zip(work, update, strict=True)]))
    peak = _peak(estimate, result)
    told = [each.suspect for each in (step, peak) if each is not None and each.suspect]
    return base.model_copy(
        update={
            "step_time": step,
            "peak_memory": peak,
            "time_terms": _rows(estimate, parts, spread(work), spread(update)),
            "verdict": verdict(failures, (), [each for each in (step, peak) if each is not None]),
            "suspects": tuple(told),
        }
    )


def _step(estimate: Estimate, parts: Parts, varied: float | None) -> Comparison:
    low, high = estimate.step_time_range_s
    step = Comparison(
        name="step time",
        predicted=estimate.step_time_s,
        measured=parts.total_s,
        low=low,
        high=high,
        spread=varied,
        origin="modelled",
    )
    if step.within:
        return step
    ratio = parts.work_s / parts.predicted_work_s if parts.predicted_work_s else 1.0
    why = (
        f"the rank's own work takes {percent(ratio)} of what was predicted: `planner calibrate --on-this-machine` "
        "measures the rates behind it"
    )
    return step.model_copy(update={"suspect": why})


def _rows(
    estimate: Estimate, parts: Parts, varied: float | None, update_varied: float | None
) -> tuple[Comparison, ...]:
    """Measured parts first, then the modelled ones, which equal the prediction or follow the measured work."""
    update = predicted_times(estimate.time)[OPTIMIZER]
    rows = [
        Comparison(name=WORK, predicted=parts.predicted_work_s, measured=parts.work_s, spread=varied),
        Comparison(name=OPTIMIZER, predicted=update, measured=parts.optimizer_s, spread=update_varied),
    ]
    modelled = {f"{kind} traffic": (value, value) for kind, value in parts.traffic_s.items()}
    modelled[BUBBLE] = (parts.predicted_bubble_s, parts.bubble_s)
    modelled[SLOWEST] = (parts.slowest_s, parts.slowest_s)
    rows += [
        Comparison(name=name, predicted=predicted, measured=value, origin="modelled")
        for name, (predicted, value) in modelled.items()
        if predicted
    ]
    return tuple(rows)


def _peak(estimate: Estimate, result: RankResult) -> Comparison | None:
    """Memory of the rank against that of its own stage, which need not be the fullest."""
    stage = estimate.memory.model_copy(update={"children": (stage_of(estimate, result),)})
    peak = compare_peak(estimate.model_copy(update={"memory": stage}), [result])
    if peak is None or peak.within:
        return peak
    return peak.model_copy(update={"suspect": memory_suspect(peak, ())})


def _notes(found: Prepared, cluster: Cluster, rank: int) -> tuple[str, ...]:
    notes = [
        f"measured: forward, backward and optimizer of rank {rank} of {found.gpus}, alone on one device, its "
        "collectives replaced by copies of the same size; modelled: traffic, pipeline bubble and waiting, from the "
        "estimate",
        "weights and data of the other ranks are not there, so losses and gradients say nothing",
    ]
    if cluster.ranks_per_core > 1:
        notes.append(
            f"the rank had a core to itself; the plan puts {cluster.ranks_per_core:g} ranks on one, so its times "
            "are multiplied by that"
        )
    return tuple(notes)
