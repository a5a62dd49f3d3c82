"""A short run of the framework that a plan is for: its own program on the rendered files, with mock data.

Megatron-LM, DeepSpeed and torchtitan train on GPUs only, so on a machine without them the run is refused.  What was
measured is read from the framework's log and compared with the estimate of its own backend."""

from __future__ import annotations

import contextlib
import datetime
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from planner.errors import MissingExtraError
from planner.render import write_files
from planner.specs.plan import PlanDocument
from planner.specs.validation import (
    Comparison,
    RankFailure,
    RankResult,
    RunEnvironment,
    StepMeasure,
    ValidationReport,
)
from planner.units import counted
from planner.version import __version__
from planner_validate import keeper
from planner_validate.framework_logs import LogFormat, RunLog, read_log
from planner_validate.frameworks import (
    Framework,
    Launch,
    amounts,
    check_installed,
    framework_of,
    installed_versions,
    prepared,
)
from planner_validate.options import WARMUP_STEPS, Options, Progress


def run(document: PlanDocument, options: Options, progress: Progress) -> ValidationReport:
    """Start the plan's own framework on this machine for ``options.steps`` steps and compare its log with the estimate.

    MissingExtraError where the framework or a device is not there."""
    framework = framework_of(document)
    check_installed(framework)
    check_devices(document, framework)
    launch = prepared(document, framework, options.steps)
    progress(f"starting {framework.log.title}")
    with tempfile.TemporaryDirectory(prefix="planner-framework-") as folder:
        write_files(Path(folder) / "plan", launch.files)
        outcome = watched(launch, Path(folder), framework.log, options.timeout_s, progress)
    log = read_log(outcome.output, framework.log, amounts(document.best.strategy))
    return report(document, framework, log, outcome)


def check_devices(document: PlanDocument, framework: Framework) -> None:
    """MissingExtraError where this machine has too few GPUs for the plan, or the plan is for none."""
    accelerator = document.request.cluster.accelerator
    if accelerator.synchronous:
        raise MissingExtraError(
            f"{framework.log.title} trains on GPUs only",
            where="--with-framework",
            got=f"a plan for {accelerator.id}",
            hint="leave --with-framework out: PyTorch alone runs the plan on processors",
        )
    wanted, there = document.best.strategy.gpus, visible_gpus()
    if there < wanted:
        raise MissingExtraError(
            f"the plan needs {counted(wanted, 'GPU')} and this machine shows {there}",
            where="--with-framework",
            hint="start it where the GPUs are, or use --memory-only, which needs none",
        )


def visible_gpus() -> int:
    """GPUs that torch sees; 0 where it sees none or cannot be asked."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        asked = subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
        )
        return int(asked.stdout.split()[-1])
    return 0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    output: str
    code: int
    stalled: bool = False
    """It printed nothing for too long and was ended."""


_POLL_S = 0.2


def watched(launch: Launch, folder: Path, form: LogFormat, timeout_s: float, progress: Progress) -> Outcome:
    """Run the launch in ``folder``/plan until it ends or prints nothing for ``timeout_s``; leaves no process behind."""
    mark = uuid.uuid4().hex
    output = folder / "output"
    command = [sys.executable, str(Path(keeper.__file__)), *launch.command]
    with output.open("wb") as sink:
        kept = subprocess.Popen(  # noqa: S603 - the command of the rendered plan
            command,
            cwd=folder / "plan",
            env=launch.environment | {keeper.MARK: mark},
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    stalled = False
    try:
        seen, since = -1, time.monotonic()
        while kept.poll() is None:
            size = output.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()
                _tell(output, form, progress)
            stalled = time.monotonic() - since > timeout_s
            if stalled:
                break
            time.sleep(_POLL_S)
    finally:
        # The keeper ends all of the run when its standard input closes.
        if kept.stdin is not None:
            kept.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            kept.wait(timeout=60)
        if kept.poll() is None:
            kept.kill()
        keeper.end_all(mark)
        kept.wait()
    return Outcome(output.read_text(encoding="utf-8", errors="replace"), kept.returncode, stalled)


def _tell(output: Path, form: LogFormat, progress: Progress) -> None:
    with output.open("rb") as stream:
        stream.seek(max(0, output.stat().st_size - 16_384))
        tail = stream.read().decode(errors="replace")
    steps = [int(match["step"]) for match in form.step.finditer(tail)]
    if steps:
        progress(f"step {max(steps)}")


def report(document: PlanDocument, framework: Framework, log: RunLog, outcome: Outcome) -> ValidationReport:
    """What was read beside what was predicted."""
    best = document.best
    estimate = best.estimate
    measured = [seconds for step, seconds in sorted(log.seconds.items()) if step > WARMUP_STEPS]
    failures = _failures(log, outcome, measured, framework)
    time_ = memory = None
    if measured and not failures:
        low, high = estimate.step_time_range_s
        time_ = Comparison(
            name="step time",
            predicted=estimate.step_time_s,
            measured=statistics.median(measured),
            low=low,
            high=high,
            spread=_spread(measured),
        )
        time_ = time_.model_copy(update={"suspect": _time_suspect(time_)})
    peak = max((each.peak for each in log.memory.values()), default=0)
    if peak and not failures:
        low, high = estimate.peak_memory_range_bytes
        memory = Comparison(name="peak memory", predicted=estimate.peak_memory_bytes, measured=peak, low=low, high=high)
        memory = memory.model_copy(update={"suspect": _memory_suspect(memory)})
    compared = [each for each in (time_, memory) if each is not None]
    inside = bool(compared) and all(each.within for each in compared)
    return ValidationReport(
        planner_version=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        mode="framework",
        plan_id=document.id,
        planned_for=best.backend,
        request=document.request,
        strategy=best.strategy,
        estimate=estimate,
        environment=RunEnvironment(
            device=document.request.cluster.accelerator.id,
            devices=best.strategy.gpus,
            hosts=(socket.gethostname(),),
            versions=installed_versions(framework),
        ),
        step_time=time_,
        peak_memory=memory,
        losses=tuple(loss for _, loss in sorted(log.losses.items())),
        ranks=_ranks(log, best.strategy.gpus),
        failures=failures,
        verdict="failed" if failures else "within" if inside else "outside",
        suspects=tuple(each.suspect for each in compared if each.suspect),
        notes=_notes(framework, log),
    )


def _spread(values: list[float]) -> float | None:
    """Half of the interquartile range over the median."""
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2 / statistics.median(values)


_NOISY = 0.1
_TAIL_LINES = 30


def _failures(log: RunLog, outcome: Outcome, measured: list[float], framework: Framework) -> tuple[RankFailure, ...]:
    """Why there is nothing to compare; none where the run ended well and its steps were read."""
    tail = "\n".join(outcome.output.splitlines()[-_TAIL_LINES:])
    last = max(log.seconds, default=0)
    phase = f"after step {last}" if last else "before the first step"
    if outcome.stalled:
        silent = RankFailure(kind="timeout", phase=phase, message="it printed nothing for too long", details=tail)
        return (*_placed(log.failures, phase, tail), silent)
    if outcome.code == 0 and measured:
        return ()
    if outcome.code != 0 and log.failures:
        return _placed(log.failures, phase, tail)
    message = (
        f"{framework.log.title} ended with exit code {outcome.code}"
        if outcome.code
        else f"no step after the {WARMUP_STEPS} that warm up was found in the log (read as in {framework.log.source})"
    )
    return (RankFailure(kind="error", phase=phase, message=message, details=tail),)


def _placed(failures: tuple[RankFailure, ...], phase: str, tail: str) -> tuple[RankFailure, ...]:
    return tuple(
        each.model_copy(update={"phase": phase, "details": tail if index == 0 else ""})
        for index, each in enumerate(failures)
    )


def _time_suspect(compared: Comparison) -> str:
    if compared.within:
        return ""
    if compared.spread is not None and compared.spread > _NOISY:
        return f"the steps differ by {compared.spread:.0%} among themselves: look for other work on the machine first"
    slower = compared.measured is not None and compared.measured > compared.predicted
    return (
        "steps are slower than predicted: compare the framework's own timers, and the links between the GPUs"
        if slower
        else "steps are faster than predicted: the machine's rates are above the published ones; calibrate"
    )


def _memory_suspect(compared: Comparison) -> str:
    if compared.within:
        return ""
    more = compared.measured is not None and compared.measured > compared.predicted
    return (
        "the ranks hold more than predicted: look at allocator fragmentation and the framework's own buffers first"
        if more
        else "the ranks that print hold less than predicted: the fullest rank may be one that does not print"
    )


def _ranks(log: RunLog, world: int) -> tuple[RankResult, ...]:
    """What the log says of single ranks: times on the first one, memory where a line names its rank."""
    steps = [
        (step, StepMeasure(seconds=seconds, forward_backward_s=seconds, optimizer_s=0.0, loss=log.losses.get(step)))
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
            "Memory is what the allocator of the printing ranks held; the estimate also counts the device's context "
            "and communication buffers."
        )
    return tuple(notes)
