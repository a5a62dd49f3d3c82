"""A short run of the framework that a plan is for: its own program on the rendered files, with mock data.

Megatron-LM, DeepSpeed and torchtitan train on GPUs only, so on a machine without them the run is refused.  What was
measured is read from the framework's log and compared with the estimate of its own backend."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from datetime import UTC, datetime

from planner.errors import MissingExtraError
from planner.render import write_files
from planner.service.usecases import estimate_document
from planner.specs.plan import PlanDocument
from planner.specs.validation import (
    RankFailure,
    RankResult,
    RunEnvironment,
    StepMeasure,
    ValidationReport,
)
from planner.units import counted
from planner.version import __version__
from planner_validate.frameworks.logs import RunLog, read_log
from planner_validate.frameworks.starts import (
    Framework,
    amounts,
    check_installed,
    framework_of,
    installed_versions,
    prepared,
)
from planner_validate.reports.comparison import compare_peak, compare_step, step_times, verdict
from planner_validate.reports.suspects import memory_suspect
from planner_validate.runs.devices import Probe, this_machine
from planner_validate.runs.launching import Ended, Folder, private_folder, supervise
from planner_validate.runs.options import WARMUP_STEPS, Options, Progress
from planner_validate.runs.plans import with_profile

PLAN_FOLDER = "plan"
"""Of the rendered files, below the folder of the run."""


def run(
    document: PlanDocument,
    options: Options,
    progress: Progress | None = None,
    *,
    probe: Probe = this_machine,
) -> ValidationReport:
    """Start the plan's own framework on this machine for ``options.steps`` steps and compare its log with the estimate.

    MissingExtraError where the framework or a device is not there."""
    framework = framework_of(document)
    document = estimate_document(with_profile(document, options.profile))
    check_installed(framework)
    check_devices(document, framework, probe)
    if progress is not None:
        progress(f"starting {framework.log.title}")
    with private_folder() as folder:
        output, ended = started(document, framework, options, folder)
    log = read_log(output, framework.log, amounts(document.best.strategy))
    return report(document, framework, log, ended)


def started(document: PlanDocument, framework: Framework, options: Options, folder: Folder) -> tuple[str, Ended]:
    """Write the files and run them to their end; everything that was printed, and how it ended."""
    launch = prepared(document, framework, options.steps)
    write_files(folder.root / PLAN_FOLDER, launch.files)
    ended = supervise(
        ("bash", f"{PLAN_FOLDER}/launch.sh", *launch.arguments),
        folder,
        ranks=document.best.strategy.gpus,
        timeout_s=options.timeout_s,
        environment=launch.environment,
        phases=False,
    )
    return folder.output.read_text(encoding="utf-8", errors="replace"), ended


def check_devices(document: PlanDocument, framework: Framework, probe: Probe) -> None:
    """MissingExtraError where this machine has too few GPUs for the plan, or the plan is for none."""
    accelerator = document.request.cluster.accelerator
    if accelerator.synchronous:
        raise MissingExtraError(
            f"{framework.log.title} trains on GPUs only",
            where="--with-framework",
            got=f"a plan for {accelerator.id}",
            hint="leave --with-framework out: PyTorch alone runs the plan on processors",
        )
    wanted, there = document.best.strategy.gpus, len(probe().gpus)
    if there < wanted:
        raise MissingExtraError(
            f"the plan needs {counted(wanted, 'GPU')} and this machine shows {there}",
            where="--with-framework",
            hint="start it where the GPUs are, or use --memory-only, which needs none",
        )


def report(document: PlanDocument, framework: Framework, log: RunLog, ended: Ended) -> ValidationReport:
    """What was read beside what was predicted."""
    best = document.best
    results = _ranks(log, best.strategy.gpus)
    failures = _failures(log, ended, results, framework)
    step = peak = None
    if not failures:
        step = compare_step(best.estimate, step_times(results[:1]))
        peak = compare_peak(best.estimate, [each for each in results if each.peak_allocated_bytes or _reserved(each)])
    if step is not None and not step.within:
        slower = (step.measured or 0.0) > step.predicted
        step = step.model_copy(update={"suspect": _SLOWER if slower else _FASTER})
    if peak is not None and not peak.within:
        peak = peak.model_copy(update={"suspect": memory_suspect(peak, ())})
    compared = [each for each in (step, peak) if each is not None]
    return ValidationReport(
        planner_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mode="framework",
        plan_id=document.id,
        planned_for=best.backend,
        request=document.request,
        strategy=best.strategy,
        estimate=best.estimate,
        environment=RunEnvironment(
            device=document.request.cluster.accelerator.id,
            devices=best.strategy.gpus,
            hosts=(socket.gethostname(),),
            versions=installed_versions(framework),
        ),
        step_time=step,
        peak_memory=peak,
        losses=tuple(loss for _, loss in sorted(log.losses.items()) if math.isfinite(loss)),
        ranks=results,
        failures=failures,
        verdict=verdict(failures, (), compared),
        suspects=tuple(each.suspect for each in compared if each.suspect),
        notes=_notes(framework, log),
    )


def _reserved(result: RankResult) -> bool:
    return result.peak_reserved_bytes is not None


_SLOWER = (
    "steps are slower than predicted: look at the framework's own timers and at the links between the GPUs; the run "
    "with PyTorch alone tells compute and traffic apart"
)
_FASTER = "steps are faster than predicted: the machine's rates are above the published ones; calibrate"


def _failures(
    log: RunLog, ended: Ended, results: Sequence[RankResult], framework: Framework
) -> tuple[RankFailure, ...]:
    """Why there is nothing to compare; none where the run ended well and its steps were read."""
    last = max(log.seconds, default=0)
    phase = f"after step {last}" if last else "before the first step"
    if ended.how == "interrupted":
        return (RankFailure(kind="interrupted", phase=phase, message="interrupted", details=ended.output),)
    if ended.how == "stalled":
        silent = RankFailure(
            kind="timeout", phase=phase, message="it printed nothing for too long", details=ended.output
        )
        return (*_placed(log.failures, phase, ended.output), silent)
    measured = bool(results) and bool(results[0].steps)
    if ended.code == 0 and measured:
        return ()
    if ended.out_of_host_memory:
        message = "the system ended processes for want of host memory"
        return (RankFailure(kind="out-of-memory", phase=phase, message=message, details=ended.output),)
    if ended.code != 0 and log.failures:
        return _placed(log.failures, phase, ended.output)
    message = (
        f"{framework.log.title} ended with exit code {ended.code}"
        if ended.code
        else f"no step after the {WARMUP_STEPS} that warm up was found in the log (read as in {framework.log.source})"
    )
    return (RankFailure(kind="error", phase=phase, message=message, details=ended.output),)


def _placed(failures: Sequence[RankFailure], phase: str, tail: str) -> tuple[RankFailure, ...]:
    return tuple(
        each.model_copy(update={"phase": phase, "details": tail if index == 0 else ""})
        for index, each in enumerate(failures)
    )


def _ranks(log: RunLog, world: int) -> tuple[RankResult, ...]:
    """What the log says of single ranks: times on the first one, memory where a line names its rank."""
    steps = [
        (step, StepMeasure(seconds=seconds, forward_backward_s=seconds, optimizer_s=0.0, loss=_finite(log, step)))
        for step, seconds in sorted(log.seconds.items())
    ]
    read = {rank or 0: memory for rank, memory in log.memory.items()}
    results = []
    for rank in sorted({0, *read} if steps else read):
        if rank >= world:
            continue
        memory = read.get(rank)
        results.append(
            RankResult(
                rank=rank,
                world_size=world,
                steps=tuple(each for step, each in steps if step > WARMUP_STEPS) if rank == 0 else (),
                warmup=tuple(each for step, each in steps if step <= WARMUP_STEPS) if rank == 0 else (),
                peak_allocated_bytes=memory.allocated if memory else None,
                peak_reserved_bytes=memory.reserved if memory else None,
            )
        )
    return tuple(results)


def _finite(log: RunLog, step: int) -> float | None:
    """JSON has no number for a loss that is none."""
    loss = log.losses.get(step)
    return loss if loss is not None and math.isfinite(loss) else None


def _notes(framework: Framework, log: RunLog) -> tuple[str, ...]:
    notes = [
        f"Step times{', losses and memory' if log.memory else ' and losses'} are what {framework.log.title} printed; "
        f"the first {WARMUP_STEPS} steps are left out.",
        "A log does not tell forward, backward and optimizer apart, so there is no comparison by term; the run with "
        "PyTorch alone has one.",
    ]
    if not log.memory:
        notes.append("The log says nothing of memory.")
    else:
        notes.append(
            "Memory is what the allocator of the printing ranks held; the predicted figure is without the device's "
            "context and communication buffers, too."
        )
    return tuple(notes)
