"""Measures the machine that this process runs on and fits a profile to what was found: ``planner calibrate
--on-this-machine``.

Imports no torch: the measurements run in processes of their own, as many as would train."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.accuracy.fits.hosts import TrainingRun
from planner.accuracy.fits.machine import Question, calibration
from planner.backends import get_backend
from planner.catalog import load_accelerator
from planner.errors import InputError, MeasurementError, MissingExtraError
from planner.machines.products import identify
from planner.service.clusters import resolve_cluster
from planner.service.requests import ClusterInput
from planner.specs.benchmark import Benchmark
from planner.specs.cluster import Cluster
from planner.specs.job import Precision
from planner.specs.measuring import BenchmarkConfig, BenchmarkResult
from planner.specs.model import ModelSpec
from planner.specs.profile import MachineCalibration, MachineMeasurement
from planner.specs.validation import RankFailure
from planner_validate.calibration.probes import training_runs
from planner_validate.calibration.worklist import Wanted, worklist
from planner_validate.runs import launching
from planner_validate.runs.devices import INSTALL, Machine, cores, this_machine
from planner_validate.runs.options import Progress

WHERE = "--on-this-machine"
BACKEND = "pytorch"
_MOST_PROCESSES = 64
_QUICK_VISITS, _VISITS = 2, 3
_REPEATS = 3
"""Of every benchmark at a visit."""
_RUN_VISITS = 2
_QUICK_BATCH_S, _BATCH_S = 0.01, 0.02


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure; None is found out."""

    gpu: str | None = None
    """Catalogue id of the accelerator; None: the GPUs that torch sees, else the processor."""
    processes: int | None = None
    """None: one a GPU, or one a processor core."""
    model: ModelSpec | None = None
    """Whose matrix shapes are timed, too."""
    seq_len: int | None = None
    precision: Precision | None = None
    quick: bool = False
    """Fewer sizes and repeats."""


def calibrate_this_machine(options: Options, progress: Progress | None = None) -> MachineCalibration:
    """Measure and fit; raises MissingExtraError without torch or without the accelerator."""
    tell = progress or _silent
    tell("asking torch for its devices")
    devices = probe()
    gpu = _accelerator(options.gpu, devices)
    processes = _processes(options.processes, gpu, devices)
    question = _question(gpu, processes)
    wanted = _wanted(options, question, processes)
    threads = max(1, int(question.cluster.cores_per_rank))
    config = BenchmarkConfig(
        device=wanted.device,
        benchmarks=worklist(wanted),
        visits=_QUICK_VISITS if options.quick else _VISITS,
        repeats=_REPEATS,
        batch_s=_QUICK_BATCH_S if options.quick else _BATCH_S,
        threads=threads,
        runs=_RUN_VISITS
        * training_runs(question.cluster, wanted.device, wanted.precision, threads=threads, quick=options.quick),
    )
    results = measured(config, processes, tell)
    rows, missing = combined(config, results)
    if not rows:
        raise MissingExtraError(
            "nothing could be measured", where=WHERE, got="; ".join(sorted(set(missing.values()))[:3]), hint=INSTALL
        )
    tell("fitting the constants")
    return calibration(
        question,
        rows,
        device_name=results[0].device_name,
        host=results[0].host,
        versions=results[0].versions,
        processes=processes,
        not_measured=missing,
        runs=trained(config, results),
    )


def _silent(_: str) -> None:
    """Nobody watches."""


def probe() -> Machine:
    """Devices of the torch that the measuring processes will import."""
    try:
        return this_machine()
    except MissingExtraError as problem:
        raise MissingExtraError(
            "measuring needs torch, which cannot be imported here",
            where=WHERE,
            got=problem.got,
            allowed=problem.allowed,
            hint=problem.hint,
        ) from problem


def _accelerator(given: str | None, devices: Machine) -> str:
    """Catalogue id of what is measured; a GPU that is named must be the one that is there."""
    named = None if given is None else load_accelerator(given)
    if named is None and not devices.gpus:
        return "cpu"
    if named is not None and (named.synchronous or not devices.gpus):
        return named.id
    try:
        found = identify(devices.gpus[0], devices.gpu_bytes[0] >> 20).accelerator
    except InputError:
        if named is None:
            raise
        # A card that the catalogue does not know may be measured under the name of its next of kin.
        return named.id
    if named is not None and named.id != found.id:
        raise InputError(
            "this machine has another accelerator",
            where="--gpu",
            got=named.id,
            allowed=f"{found.id} ({devices.gpus[0]}), or cpu",
            hint="leave out --gpu to measure what is there",
        )
    return found.id


def _processes(given: int | None, gpu: str, devices: Machine) -> int:
    """How many measure at the same time."""
    on_cpu = _cluster(gpu, 1).accelerator.synchronous
    if not on_cpu and not devices.gpus:
        raise MissingExtraError(
            f"torch {devices.torch} sees no GPU here",
            where="--gpu",
            got=gpu,
            allowed="cpu on this machine",
            hint="--gpu cpu measures the processor; a GPU needs its driver and a torch that is built for it",
        )
    most = _MOST_PROCESSES if on_cpu else len(devices.gpus)
    if given is None:
        return min(cores(), _MOST_PROCESSES) if on_cpu else most
    if not 1 <= given <= most:
        raise InputError(
            "this machine cannot be measured by that many processes",
            where="--nproc",
            got=str(given),
            allowed=f"1 to {most}" + ("" if on_cpu else f" (torch sees {most} GPUs)"),
            hint="as many as the ranks that will train on it",
        )
    return given


def _cluster(gpu: str, processes: int) -> Cluster:
    """This machine with that many ranks on it."""
    return resolve_cluster(ClusterInput(gpu=gpu, gpus=processes)).cluster


def _question(gpu: str, processes: int) -> Question:
    return Question(_cluster(gpu, processes), get_backend(BACKEND))


def _wanted(options: Options, question: Question, processes: int) -> Wanted:
    accelerator = question.cluster.accelerator
    precision: Precision = options.precision or ("bf16" if accelerator.peak.bf16 is not None else "fp32")
    peaks = {"fp32": accelerator.peak.fp32, "bf16": accelerator.peak.bf16, "fp16": accelerator.peak.fp16}
    rate = peaks.get(precision)
    if rate is None:
        raise InputError(
            f"{accelerator.id} has no {precision} matrix rate",
            where="--precision",
            got=precision,
            allowed=", ".join(name for name, peak in peaks.items() if peak is not None),
            hint="choose a format that the accelerator computes in",
        )
    return Wanted(
        device="cpu" if accelerator.synchronous else "cuda",
        processes=processes,
        precision=precision,
        flops_per_s=rate * question.cluster.cores_per_rank,
        model=options.model,
        seq_len=options.seq_len,
        quick=options.quick,
        narrow=accelerator.peak.fp8 is not None,
    )


def measured(config: BenchmarkConfig, processes: int, progress: Progress) -> list[BenchmarkResult]:
    """What every process found, by rank; MeasurementError where one of them failed or stalled."""
    with launching.private_folder() as folder:
        try:
            folder.config.write_text(config.model_dump_json(), encoding="utf-8")
        except OSError as problem:
            raise MeasurementError(
                f"the files of the measurement cannot be written: {problem.strerror or problem}",
                where="temporary folder",
                got=str(folder.root.parent),
                hint="free some space, or name another folder with TMPDIR",
            ) from problem
        ended = launching.supervise(
            launching.torchrun(folder, processes, ("-m", "planner_validate.calibration.benchmarks")),
            folder,
            ranks=processes,
            timeout_s=config.timeout_s,
            environment=launching.surroundings(config.threads, config.device),
            progress=progress,
        )
        if ended.how == "interrupted":
            raise KeyboardInterrupt
        files = [folder.results / f"rank-{rank}.json" for rank in range(processes)]
        if all(file.exists() for file in files):
            return [BenchmarkResult.model_validate_json(file.read_text(encoding="utf-8")) for file in files]
        told = _told(folder.results)
        raise _failed(launching.explained(folder, processes, ended, (), told, config.timeout_s))


def _told(folder: Path) -> list[RankFailure]:
    """What processes said of their failures, the first one first."""
    files = sorted(folder.glob("rank-*.failure.json"), key=lambda file: file.stat().st_mtime)
    return [RankFailure.model_validate_json(file.read_text(encoding="utf-8")) for file in files]


def _failed(failures: Sequence[RankFailure]) -> MeasurementError:
    """The first cause, and how many processes it took along."""
    first = failures[0]
    who = "a process" if first.rank is None else f"process {first.rank}"
    return MeasurementError(
        f"{who} failed at {first.phase}: {first.message}",
        where=WHERE,
        got=first.details or None,
        hint=_HINTS.get(first.kind, "run it again; --nproc with fewer processes needs less"),
    )


_HINTS = {
    "out-of-memory": "take fewer processes (--nproc) or a shorter --seq-len",
    "timeout": "is the machine overloaded, or a GPU hung? Try again with --quick",
}


def combined(
    config: BenchmarkConfig, results: Sequence[BenchmarkResult]
) -> tuple[list[MachineMeasurement], dict[str, str]]:
    """One measurement a benchmark, that of the slowest process; and the reason of what was not measured."""
    rows, missing = [], {}
    for index, benchmark in enumerate(config.benchmarks):
        timings = [result.timings[index] for result in results]
        slowest = max(timings, key=lambda timing: timing.seconds or 0.0)
        if slowest.seconds is None or any(timing.seconds is None for timing in timings):
            missing[_title(benchmark)] = next(timing.reason for timing in timings if timing.reason)
            continue
        rows.append(
            MachineMeasurement(
                **benchmark.model_dump(), seconds=slowest.seconds, spread=slowest.spread, repeats=slowest.repeats
            )
        )
    return rows, missing


def trained(config: BenchmarkConfig, results: Sequence[BenchmarkResult]) -> list[TrainingRun]:
    """Every training run with the median of its slowest process over all its visits."""
    visits: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(config.runs):
        visits[run.model_dump_json()].append(index)
    runs = []
    for indices in visits.values():
        seconds = [
            statistics.median(step.seconds for index in indices for step in result.runs[index]) for result in results
        ]
        runs.append(TrainingRun(config.runs[indices[0]], max(seconds)))
    return runs


def _title(benchmark: Benchmark) -> str:
    return f"{benchmark.kind} {benchmark.label}"
