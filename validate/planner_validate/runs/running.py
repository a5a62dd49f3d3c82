"""The real run: a plan's processes on this machine, or the files that a job of it wrote elsewhere, as a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner.errors import InputError
from planner.specs.plan import PlanDocument
from planner.specs.problems import shown
from planner.specs.validation import RankFailure, RankResult, ValidationReport
from planner.units import duration
from planner_validate.reports.comparison import report
from planner_validate.runs.devices import Probe, this_machine
from planner_validate.runs.launching import Command, End, config_of, launch, read_partial, read_results, torchrun
from planner_validate.runs.options import Options, Progress
from planner_validate.runs.plans import prepared, runnable

INTERRUPTED = "interrupted before the last step: what follows is what was measured until then"


def run(
    document: PlanDocument,
    options: Options,
    progress: Progress | None = None,
    *,
    command: Command = torchrun,
    probe: Probe = this_machine,
) -> ValidationReport:
    """Train the plan for a few steps with all its processes here and compare; raises where it cannot be started."""
    found, config = runnable(document, options, probe)
    if progress is not None:
        # Warm-up and measured steps, and two that are observed.
        steps_s = (options.steps + 2) * found.estimate.step_time_s
        progress(f"starting {found.gpus} processes; the steps take about {duration(steps_s)} by the estimate")
    launched = launch(config, found.gpus, progress, command=command)
    measured = sorted((*launched.results, *launched.partial), key=lambda each: each.rank)
    return report(found, measured, launched.failures, notes=_end(launched.how))


def _end(how: End) -> tuple[str, ...]:
    return (INTERRUPTED,) if how == "interrupted" else ()


def was_interrupted(found: ValidationReport) -> bool:
    """Whether somebody ended the run."""
    return any(failure.kind == "interrupted" for failure in found.failures)


def from_results(document: PlanDocument, options: Options, folder: Path) -> ValidationReport:
    """The report of a run whose ranks wrote their files elsewhere; InputError where the files are not of this plan."""
    found = prepared(document, options)
    if not folder.is_dir():
        raise InputError(
            "there is no such folder",
            where="--results",
            got=shown(str(folder)),
            allowed="the folder with the rank-*.json files of a run",
            hint="the job writes it where its --out says",
        )
    results, failures = read_results(folder)
    if not results and not failures:
        raise InputError(
            "the folder has no results of ranks",
            where="--results",
            got=shown(str(folder)),
            allowed="rank-0.json, rank-1.json ...",
            hint="the job has not finished, or it wrote elsewhere",
        )
    _check_world(folder, results, found.gpus)
    for path in (folder / "run.json", folder.parent / "run.json"):
        config = config_of(path)
        if config is not None and config.strategy != found.document.best.strategy:
            raise InputError(
                "the results are of another strategy than the plan's",
                where="--results",
                got=shown(str(path)),
                allowed=shown(found.document.best.strategy.model_dump_json(exclude_defaults=True)),
                hint="name the plan.json that the job files were written from",
            )
    failures += _missing(results, failures, found.gpus)
    results += read_partial(folder, {result.rank for result in results})
    return report(found, results, failures, notes=(f"read from {folder}",))


def _check_world(folder: Path, results: Sequence[RankResult], gpus: int) -> None:
    sizes = {result.world_size for result in results}
    if sizes - {gpus}:
        raise InputError(
            "the results are of another number of processes than the plan has",
            where="--results",
            got=f"{shown(str(folder))}: world size {', '.join(map(str, sorted(sizes)))}",
            allowed=str(gpus),
            hint="name the plan.json that the job files were written from",
        )


def _missing(results: Sequence[RankResult], failures: Sequence[RankFailure], gpus: int) -> list[RankFailure]:
    """Ranks of which the folder has nothing, as one failure."""
    there = {result.rank for result in results} | {failure.rank for failure in failures}
    missing = [rank for rank in range(gpus) if rank not in there]
    if not missing:
        return []
    named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return [
        RankFailure(
            rank=missing[0] if len(missing) == 1 else None,
            kind="error",
            phase="end",
            message=f"no file of rank {named}: still running, ended without a word, or its file was left elsewhere",
        )
    ]
