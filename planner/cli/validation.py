"""``planner validate``: a short real run of a plan, compared term by term with the estimate.

No decision is taken here; heavy modules are imported inside the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import options as o
from planner.errors import InputError, PlannerError

if TYPE_CHECKING:
    from planner.specs.plan import PlanDocument
    from planner.specs.validation import ValidationReport
    from planner_validate.runs.options import Options, Progress

EXIT_OUTSIDE = 5
EXIT_INTERRUPTED = 130
RUN = "Run"
OTHER = "Instead of the whole run"

Mode = Callable[["PlanDocument", "Options", "Progress"], "ValidationReport"]


def validate(
    plan: Annotated[
        Path, typer.Argument(help="The document that `planner suggest --json` printed.", metavar="PLAN.json")
    ],
    steps: Annotated[
        int, typer.Option("--steps", help="Optimizer steps; the first 3 warm up.", rich_help_panel=RUN)
    ] = 8,
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Processes, as many as the plan has GPUs.", rich_help_panel=RUN)
    ] = None,
    profile: o.ProfilePath = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", help="Seconds without progress after which it is given up.", rich_help_panel=RUN),
    ] = 300.0,
    gradient_check: Annotated[
        bool,
        typer.Option(
            "--gradient-check/--no-gradient-check",
            help="First compare the gradients of a tiny copy with an unsharded one.",
            rich_help_panel=RUN,
        ),
    ] = True,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="One rank's work on one device.", rich_help_panel=OTHER)
    ] = False,
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Memory of ranks, without any device.", rich_help_panel=OTHER)
    ] = False,
    with_framework: Annotated[
        bool, typer.Option("--with-framework", help="The plan's own framework, mock data.", rich_help_panel=OTHER)
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option("--results", help="Folder with what the ranks of a job wrote.", rich_help_panel=OTHER),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            help="Write a job of the run to --out: slurm, trainjob, ... as for render.",
            rich_help_panel=OTHER,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", help="Folder or prefix of the report (.json, .md, .svg), or of the job.", rich_help_panel=o.OUTPUT
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Append the run to this record file (.jsonl).", rich_help_panel=o.OUTPUT),
    ] = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Train a plan for a few real steps with PyTorch alone and compare with the estimate.

    Exit code 0: within the stated ranges, 5: outside of them or failed, 6: torch or a device is missing, 2: bad input.
    """
    from planner_validate.reports import records, report
    from planner_validate.runs import plans
    from planner_validate.runs.options import Options

    _one_of_many(
        {
            "--proxy": proxy,
            "--memory-only": memory_only,
            "--with-framework": with_framework,
            "--results": results is not None,
            "--launcher": launcher is not None,
        }
    )
    options = Options(steps=steps, processes=nproc, profile=profile, timeout_s=timeout, check_gradients=gradient_check)
    document = plans.read(plan)
    if launcher is not None:
        _write_job(document, options, launcher, out, force=force, as_json=as_json)
        return
    if out is not None:
        report.check_out(out, force=force, plan=plan)
    if record is not None:
        records.check_record(record)
    mode = _mode(results, proxy=proxy, memory_only=memory_only, with_framework=with_framework)
    _finish(_run(mode, document, options, quiet=as_json), _Outputs(out, record, force, as_json))


def _one_of_many(given: dict[str, bool]) -> None:
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise InputError(
            "these exclude each other",
            where=", ".join(given),
            got=" ".join(named),
            allowed="at most one of them",
            hint="none of them runs the whole plan here",
        )


def _mode(results: Path | None, *, proxy: bool, memory_only: bool, with_framework: bool) -> Mode:
    """What is to be done with the plan."""
    if results is not None:
        from planner_validate.runs import running

        return lambda document, options, _: running.from_results(document, options, results)
    chosen = {
        "runs.proxy": proxy,
        "runs.memory_only": memory_only,
        "frameworks.framework": with_framework,
        "runs.running": True,
    }
    module = import_module(f"planner_validate.{next(name for name, wanted in chosen.items() if wanted)}")
    mode: Mode = module.run
    return mode


def _run(mode: Mode, document: PlanDocument, options: Options, *, quiet: bool) -> ValidationReport:
    from planner.cli import console

    with console.progress(quiet=quiet, what="validating") as tell:
        return mode(document, options, tell or _silent)


def _silent(_: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class _Outputs:
    out: str | None
    record: Path | None
    force: bool
    as_json: bool


def _finish(found: ValidationReport, to: _Outputs) -> None:
    """Print first, then write: a full disk must not cost what was measured."""
    from planner.cli import problems, validated
    from planner_validate.reports import report
    from planner_validate.runs.running import was_interrupted

    if to.as_json:
        problems.print_json(report.as_json(found))
    else:
        validated.print_report(found)
    try:
        _write(found, to)
    except PlannerError as problem:
        # With --json the report on standard output is one document, so this goes beside it.
        problems.print_error(problem)
        raise typer.Exit(problem.exit_code) from problem
    if was_interrupted(found):
        raise typer.Exit(EXIT_INTERRUPTED)
    if found.verdict != "within":
        raise typer.Exit(EXIT_OUTSIDE)


def _write(found: ValidationReport, to: _Outputs) -> None:
    from planner.cli import validated
    from planner_validate.reports import records, report

    written: list[Path] = []
    notes: list[str] = []
    if to.out is not None:
        written, missing = report.write(found, to.out, force=to.force)
        notes += [missing] if missing else []
    if to.record is not None:
        if records.append(found, to.record):
            written.append(to.record)
        else:
            notes.append("no record: the run measured no whole step of the whole plan")
    validated.print_written(written, notes, beside=to.as_json)


def _write_job(
    document: PlanDocument, options: Options, launcher: str, out: str | None, *, force: bool, as_json: bool
) -> None:
    """The files that start the run as a job of a cluster."""
    from planner import service
    from planner.cli import output, problems
    from planner_validate.runs import plans

    if out is None:
        raise InputError(
            "a job is a folder of files",
            where="--launcher",
            got=launcher,
            allowed="--launcher together with --out FOLDER",
            hint="add --out FOLDER",
        )
    service.check_output(Path(out), launcher)
    found = plans.prepared(document, options)
    files = service.render_document(found.document, launcher=launcher)
    written = service.write_document(files, Path(out), force=force)
    if as_json:
        told = {"lost": list(found.changed), "warnings": list(found.notes)}
        problems.print_json({"files": files, "written": [str(path) for path in written], **told})
        return
    output.print_lost(found.changed, found.notes)
    output.print_written(written, document.request.cluster.nodes)
