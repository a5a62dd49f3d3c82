"""Commands about configurations and plans that exist already: check one, find out why its run is slow, write its files.

No decision is taken here; heavy modules are imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import inputs
from planner.cli import options as o
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.service import CheckRequest, ClusterInput, JobInput

EXIT_NOT_SOUND = 3

Paths = Annotated[
    list[Path],
    typer.Argument(help="A configuration file, several that belong together, or their folder.", metavar="FILE..."),
]
Format = Annotated[
    str | None, typer.Option("--format", help="Format of the file, if it is not recognised.", rich_help_panel=o.INPUT)
]
ModelHere = Annotated[
    str | None,
    typer.Option("--model", help="Model, where the file does not state its dimensions.", rich_help_panel=o.INPUT),
]
RecomputeHere = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        help="none, selective, selective:MODULES or full, where the file does not say (DeepSpeed: the code does).",
        rich_help_panel=o.STRATEGY,
    ),
]
Advise = Annotated[bool, typer.Option("--advise/--no-advise", help="Try single changes.", rich_help_panel=o.SEARCH)]


def check(
    paths: Paths,
    model: ModelHere = None,
    reader: Format = None,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest", help="Also search for the best plan of the same framework.", rich_help_panel=o.SEARCH
        ),
    ] = False,
    advise: Advise = True,
    gpu: o.Gpu = None,
    gpus: o.Gpus = None,
    nodes: o.Nodes = None,
    gpus_per_node: o.GpusPerNode = None,
    cluster: o.ClusterPath = None,
    nics: o.Nics = None,
    nic_gbps: o.NicGbps = None,
    oversubscription: o.Oversubscription = None,
    host_memory_gib: o.HostMemory = None,
    price: o.Price = None,
    profile: o.ProfilePath = None,
    seq_len: o.SeqLen = None,
    global_batch: o.GlobalBatch = None,
    precision: o.Precision = None,
    recompute: RecomputeHere = None,
    memory_margin: o.MemoryMargin = 0.0,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Check a configuration of Megatron-LM, DeepSpeed, accelerate, torchtitan or nanotron: legal? fits? fast?

    Exit code 0: legal and fits (without --gpu and --cluster: legal), 3: the framework would refuse it or it does not
    fit, 2: it cannot be read, or something is missing to price it on the machines that were named.
    """
    from planner import service
    from planner.cli import checks, console, problems

    machines = inputs.cluster(
        gpu, gpus, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, cluster
    )
    job = inputs.job(seq_len, global_batch, precision, "auto", False, "throughput", memory_margin)
    asked = _asked(paths, model, reader, profile, machines, job, recompute, suggest=suggest, advise=advise)
    with console.progress(quiet=as_json, what="checking") as report:
        found = service.check(asked, report)
    problems.print_json(found.to_json_dict()) if as_json else checks.print_check(found)
    if not found.legal or found.fits is False:
        raise typer.Exit(EXIT_NOT_SOUND)
    if found.fits is None and (gpu is not None or cluster is not None):
        raise typer.Exit(InputError.exit_code)


def diagnose(
    paths: Paths,
    measured_tokens_per_s: Annotated[
        float,
        typer.Option("--measured-tokens-per-s", help="Tokens a second of the whole job.", rich_help_panel=o.INPUT),
    ],
    model: ModelHere = None,
    reader: Format = None,
    gpu: o.Gpu = None,
    gpus: o.Gpus = None,
    nodes: o.Nodes = None,
    gpus_per_node: o.GpusPerNode = None,
    cluster: o.ClusterPath = None,
    nics: o.Nics = None,
    nic_gbps: o.NicGbps = None,
    oversubscription: o.Oversubscription = None,
    host_memory_gib: o.HostMemory = None,
    price: o.Price = None,
    profile: o.ProfilePath = None,
    seq_len: o.SeqLen = None,
    global_batch: o.GlobalBatch = None,
    precision: o.Precision = None,
    recompute: RecomputeHere = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Explain a measured speed: corrected MFU, what was expected, and the first causes in order."""
    from planner import service
    from planner.cli import checks, console, problems

    machines = inputs.cluster(
        gpu, gpus, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, cluster
    )
    job = inputs.job(seq_len, global_batch, precision, "auto", False, "throughput", 0.0)
    asked = _asked(paths, model, reader, profile, machines, job, recompute)
    with console.progress(quiet=as_json, what="diagnosing") as report:
        found = service.diagnose(asked, measured_tokens_per_s, report)
    problems.print_json(found.to_json_dict()) if as_json else checks.print_diagnosis(found)


def render(
    plan: Annotated[
        Path | None,
        typer.Argument(help="The document that `planner suggest --json` printed.", metavar="[PLAN.json]"),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="An existing configuration instead of a plan; repeatable.", rich_help_panel=o.INPUT
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--to", help="Another framework, see `planner backends`.", rich_help_panel=o.OUTPUT),
    ] = None,
    out: o.Out = None,
    launcher: o.Launcher = "torchrun",
    force: o.Force = False,
    model: ModelHere = None,
    reader: Format = None,
    gpu: o.Gpu = None,
    gpus: o.Gpus = None,
    nodes: o.Nodes = None,
    gpus_per_node: o.GpusPerNode = None,
    cluster: o.ClusterPath = None,
    seq_len: o.SeqLen = None,
    global_batch: o.GlobalBatch = None,
    precision: o.Precision = None,
    recompute: RecomputeHere = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Write the files that start a plan (without --out: print them), for its own framework or for another one.

    With --from an existing configuration is read instead, and what the other framework cannot carry is listed.
    """
    from planner import service
    from planner.cli import output, problems

    service.check_output(out, launcher)
    if (plan is None) == (not source):
        named = [str(path) for path in (plan, *(source or ())) if path is not None]
        raise InputError(
            "there must be one thing to render",
            where="PLAN.json, --from",
            got=", ".join(named) or "nothing",
            allowed="a plan.json, or the files of one configuration",
            hint="each file of a configuration needs its own --from" if named else "give a plan.json, or --from FILE",
        )
    if plan is not None:
        done = service.convert_document(service.load_plan(plan), target)
    else:
        machines = inputs.cluster(gpu, gpus, nodes, gpus_per_node, None, None, None, None, None, cluster)
        job = inputs.job(seq_len, global_batch, precision, "auto", False, "throughput", 0.0)
        done = service.convert_files(_asked(source or [], model, reader, None, machines, job, recompute), target)
    files = service.render_document(done.document, launcher=launcher)
    written = service.write_document(files, out, force=force) if out is not None else []
    if as_json:
        told = {"lost": list(done.lost), "warnings": list(done.short)}
        problems.print_json({"files": files, "written": [str(path) for path in written], **told})
        return
    if out is None:
        output.print_files(files)
        output.print_lost(done.lost, done.short, beside=True)
        return
    output.print_lost(done.lost, done.short)
    output.print_written(written, done.document.request.cluster.nodes)


def _asked(
    paths: list[Path],
    model: str | None,
    reader: str | None,
    profile: Path | None,
    machines: ClusterInput,
    job: JobInput,
    recompute: str | None,
    *,
    suggest: bool = False,
    advise: bool = True,
) -> CheckRequest:
    from planner.service import CheckRequest

    return CheckRequest(
        paths=tuple(paths),
        reader=reader,
        model=model,
        cluster=machines,
        job=job,
        profile=profile,
        recompute=recompute,
        suggest=suggest,
        advise=advise,
    )
