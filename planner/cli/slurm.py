"""``planner slurm-submit``: a job file -> a plan, its files in a folder, and a job of Slurm.

The plan comes from a service where one is named, else from a search on this machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import options as o
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.specs.plan import PlanDocument
    from planner_api.clients.job_file import Asked, JobFile
    from planner_api.clients.slurm import Submitted

LAUNCHER = "slurm"


@dataclass(frozen=True)
class _Prepared:
    """Everything that is known before sbatch is called."""

    job: JobFile
    document: PlanDocument
    files: dict[str, str]
    folder: Path
    findings: tuple[str, ...]


def slurm_submit(
    job_file: Annotated[
        Path, typer.Argument(help="What is trained where, and what Slurm is told.", metavar="JOB.yaml")
    ],
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar="PLANNER_URL",
            help="Ask this service for the plan (token: PLANNER_TOKEN); without it the search runs here.",
            rich_help_panel=o.SEARCH,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be submitted; write nothing.", rich_help_panel=o.OUTPUT),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the job's files; default: the plan's name.",
            rich_help_panel=o.OUTPUT,
            parser=o.folder,
            metavar="PATH",
        ),
    ] = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Plan a job and hand it to Slurm.  Exit code 3 if nothing fits: then nothing is submitted."""
    from planner import service
    from planner.cli import problems
    from planner_api.clients import slurm
    from planner_api.clients.job_file import in_its_words, load_job

    job = load_job(job_file)
    if not dry_run:
        slurm.require("sbatch")
    service.check_output(out, LAUNCHER)
    try:
        prepared = _prepared(job, job_file.parent, server, out, quiet=as_json)
    except PlannerError as error:
        raise in_its_words(error, job_file) from error
    submitted: Submitted | None = None
    if not dry_run:
        service.write_document(prepared.files, prepared.folder, force=force)
        submitted = _submitted(prepared)
    problems.print_json(_document(prepared, submitted)) if as_json else _print(prepared, submitted)


def _submitted(prepared: _Prepared) -> Submitted:
    """What sbatch answers; Ctrl-C meanwhile leaves open whether there is a job, and what then is said."""
    from planner.cli.console import stderr
    from planner_api.clients import slurm

    try:
        return slurm.submit(prepared.folder, prepared.job.slurm)
    except KeyboardInterrupt:
        stderr().print(slurm.unclear(prepared.folder, prepared.job.slurm), soft_wrap=True, markup=False)
        raise


def _prepared(job: JobFile, folder: Path, server: str | None, out: Path | None, *, quiet: bool) -> _Prepared:
    """The plan and its files, setup.sh among them."""
    from planner.render.launch import job_name
    from planner_api.clients import slurm
    from planner_api.clients.job_file import asked

    findings: tuple[str, ...] = ()
    machines = job.stated_machines
    if job.reads_slurm:
        reading = slurm.machines(job)
        machines = slurm.stated_size(reading, job)
        findings = tuple(finding.message for finding in reading.findings)
    question = asked(job, folder, machines)
    document, files = _here(question, quiet=quiet) if server is None else _there(question, server)
    files = slurm.with_setup(files, job.slurm, folder)
    return _Prepared(job, document, files, out or Path(job_name(document)), findings)


def _here(question: Asked, *, quiet: bool) -> tuple[PlanDocument, dict[str, str]]:
    from planner import service
    from planner.cli import console

    with console.progress(quiet=quiet) as report:
        try:
            document = service.suggest(question.request(), report)
        except service.Interrupted as stop:
            # What was found until then is no answer to hand to a cluster.
            raise KeyboardInterrupt from stop
    return document, service.render_document(document, launcher=LAUNCHER)


def _there(question: Asked, server: str) -> tuple[PlanDocument, dict[str, str]]:
    from planner_api.clients.rest import PlannerClient

    with PlannerClient(server) as client:
        document = client.suggest(question.body())
        return document, client.artifacts(document.id, LAUNCHER)


def _groups(document: PlanDocument) -> list[dict[str, Any]]:
    """Size, stride and place of the groups that share something, outermost first; none for a single GPU."""
    from planner.render import rank_grids

    rows: dict[str, dict[str, Any]] = {}
    for grid in rank_grids(document, document.best):
        for kind in grid.groups():
            rows.setdefault(
                kind.name,
                {
                    "name": kind.name,
                    "size": kind.size,
                    "stride": kind.stride,
                    "nodes": grid.nodes_of_a_group(kind),
                    "shares": kind.meaning,
                },
            )
    return list(rows.values())


def _document(prepared: _Prepared, submitted: Submitted | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    from planner.service.words import strategy_text
    from planner_api.clients import slurm

    document, estimate = prepared.document, prepared.document.best.estimate
    number = "%j" if submitted is None else submitted.job_id
    return {
        "job_id": None if submitted is None else submitted.job_id,
        "cluster": None if submitted is None else submitted.cluster,
        "submitted": submitted is not None,
        "plan_id": document.id,
        "strategy": strategy_text(document.best),
        "fits": estimate.fits,
        "step_time_s": estimate.step_time_s,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "memory_limit_bytes": estimate.memory_limit_bytes,
        "nodes": document.request.cluster.nodes,
        "gpus": document.request.cluster.gpus,
        "groups": _groups(document),
        "folder": str(prepared.folder),
        "files": sorted(prepared.files),
        "command": slurm.command(prepared.job.slurm),
        "log": str(prepared.folder / _log(prepared, number)),
        "findings": list(prepared.findings),
        "warnings": list(document.warnings),
    }


def _log(prepared: _Prepared, number: int | str) -> str:
    from planner_api.clients import slurm

    return slurm.log_name(prepared.files.get("job.sbatch", ""), prepared.job.slurm, number)


def _print(prepared: _Prepared, submitted: Submitted | None) -> None:
    from rich.text import Text

    from planner.cli import output
    from planner.cli.console import stdout
    from planner.service.summary import assumption_lines
    from planner_api.clients import slurm

    console, document = stdout(), prepared.document
    console.print(Text("Would be submitted" if submitted is None else f"Submitted batch job {submitted.job_id}"))
    output.print_verdict(document)
    output.notes(console, "Groups", [_group_line(group) for group in _groups(document)])
    output.notes(console, "Machines", prepared.findings, style="yellow")
    output.notes(console, "Warnings", document.warnings, style="yellow")
    output.notes(console, "Assumed", assumption_lines(document.assumptions))
    start = f"cd {shlex.quote(str(prepared.folder))} && {shlex.join(slurm.command(prepared.job.slurm))}"
    output.section(console, "Job")
    if submitted is None:
        output.indented(console, f"files of {prepared.folder}: {', '.join(sorted(prepared.files))}")
        console.print(Text(f"  {start}", style="cyan"), soft_wrap=True)
        console.print(Text("\nNext: the same without --dry-run", style="cyan"))
        return
    log = shlex.quote(str(prepared.folder / _log(prepared, submitted.job_id)))
    output.indented(console, f"all ranks print to {log}; README.md beside it says what to watch")
    console.print(Text(f"  again: {start}", style="cyan"), soft_wrap=True)
    console.print(Text(f"\nNext: squeue --job {submitted.job_id}, then tail -f {log}", style="cyan"), soft_wrap=True)


def _group_line(group: dict[str, Any]) -> str:
    last = (group["size"] - 1) * group["stride"]
    ranks = f"0, {last}" if group["size"] == 2 else f"0, {group['stride']}, ..., {last}"
    where = "one node" if group["nodes"] == 1 else f"{group['nodes']} nodes"
    return f"{group['name']} {group['size']}: {group['shares']}; first group ranks {ranks}, on {where}"
