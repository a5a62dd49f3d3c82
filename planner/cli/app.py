"""The commands of ``planner``: each reads its options, calls the service and prints the document.

No decision is taken here.  Heavy modules are imported inside the commands, so that ``planner --help`` stays fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import existing, inputs, machines, serving, slurm, validation
from planner.cli import options as o
from planner.errors import InputError
from planner.version import __version__

if TYPE_CHECKING:
    from planner.specs.plan import PlanDocument

EXIT_OK = 0
EXIT_DOES_NOT_FIT = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="planner",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Finds the parallel training strategy for a model on a cluster, says why, and writes the launch files.",
    epilog="Exit codes: 0 done, 1 internal error, 2 bad input, 3 nothing fits, 4 time limit without a plan, "
    "5 measured outside the stated ranges, 6 missing dependency, 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"planner {__version__}\n")
        raise typer.Exit(EXIT_OK)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command()
def suggest(
    model: o.Model,
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
    loss: o.Loss = "auto",
    no_flash_attention: o.NoFlash = False,
    memory_margin: o.MemoryMargin = 0.0,
    objective: o.Objective = "throughput",
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="auto (megatron, deepspeed and fsdp), or one of `planner backends`.",
            rich_help_panel=o.SEARCH,
        ),
    ] = "auto",
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Keep a value: --pin tp=8,zero_stage=1; repeatable.", rich_help_panel=o.SEARCH),
    ] = None,
    rule_of_thumb: Annotated[
        bool,
        typer.Option(
            "--rule-of-thumb", help="Also price what the usual size-based rule picks.", rich_help_panel=o.SEARCH
        ),
    ] = False,
    top: Annotated[int, typer.Option("--top", help="Plans in the table.", rich_help_panel=o.SEARCH)] = 5,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds after which the search stops.", rich_help_panel=o.SEARCH),
    ] = None,
    out: o.Out = None,
    launcher: o.Launcher = "torchrun",
    report: o.Report = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Find the best strategy that a training framework can run."""
    from planner import service
    from planner.cli import console
    from planner.report.files import check_beside, check_reports, write_reports

    request = service.PlanRequest(
        model=model,
        cluster=inputs.cluster(
            gpu, gpus, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, cluster
        ),
        job=inputs.job(seq_len, global_batch, precision, loss, no_flash_attention, objective, memory_margin),
        backend=backend,
        pins=tuple(pin or ()),
        profile=profile,
        rule_of_thumb=rule_of_thumb,
        top=top,
        time_limit_s=time_limit,
    )
    service.check_output(out, launcher)
    check_reports(report or (), force=force, out=out)
    interrupted = False
    with console.progress(quiet=as_json) as progress:
        try:
            document = service.suggest(request, progress)
        except service.Interrupted as stop:
            document, interrupted = stop.document, True
    files = service.render_document(document, launcher=launcher) if out is not None else None
    written = []
    if files is not None and out is not None:
        check_beside(report or (), out, files)
        written = service.write_document(files, out, force=force)
    write_reports(document, report or ())
    _print(document, as_json, written, report or ())
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def estimate(
    context: typer.Context,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan.json to estimate again, instead of options.", metavar="[PLAN.json]")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="As for suggest.")] = None,
    backend: Annotated[str, typer.Option("--backend", help="One of `planner backends`.")] = "megatron",
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    vpp: o.Vpp = 1,
    cp: o.Cp = 1,
    ep: o.Ep = 1,
    etp: o.Etp = None,
    zero_stage: o.ZeroStage = None,
    shard_degree: o.ShardDegree = None,
    secondary_shard_degree: o.SecondaryShardDegree = None,
    micro_batch: o.MicroBatch = 1,
    sequence_parallel: o.SequenceParallel = None,
    schedule: o.Schedule = None,
    recompute: o.Recompute = "none",
    offload: o.Offload = "none",
    layers_per_stage: o.LayersPerStage = None,
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
    loss: o.Loss = "auto",
    no_flash_attention: o.NoFlash = False,
    memory_margin: o.MemoryMargin = 0.0,
    report: o.Report = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Estimate a given strategy: is it legal, does it fit, how fast is it?  Exit code 3 if it does not fit."""
    from planner import service
    from planner.report.files import check_reports, write_reports

    check_reports(report or (), force=force)
    if plan is not None:
        _only_plan(context)
        document = service.estimate_document(service.load_plan(plan))
    else:
        if model is None:
            raise InputError("no model is given", where="--model", hint="name a model, or give a plan.json")
        document = service.estimate(
            model,
            inputs.cluster(
                gpu, gpus, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, cluster
            ),
            inputs.job(seq_len, global_batch, precision, loss, no_flash_attention, "throughput", memory_margin),
            service.StrategyInput(
                tp=tp,
                pp=pp,
                vpp=vpp,
                cp=cp,
                ep=ep,
                etp=etp,
                zero_stage=zero_stage,
                shard_degree=shard_degree,
                secondary_shard_degree=secondary_shard_degree,
                micro_batch=micro_batch,
                sequence_parallel=sequence_parallel,
                schedule=schedule,
                recompute=recompute,
                offload=offload,
                layers_per_stage=layers_per_stage,
            ),
            backend=backend,
            profile=profile,
        )
    write_reports(document, report or ())
    _print(document, as_json, reports=report or ())
    if not document.best.estimate.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


app.command()(existing.render)
app.command()(existing.check)
app.command()(existing.diagnose)
app.command()(validation.validate)
app.command()(slurm.slurm_submit)
app.command()(serving.serve)
app.command()(serving.worker)


@app.command()
def models(
    text: Annotated[str, typer.Argument(help="Only models with this in their name.", metavar="[TEXT]")] = "",
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """List the models of the catalogue."""
    from planner import service
    from planner.cli import listings, problems

    rows = service.list_models(text)
    problems.print_json(rows) if as_json else listings.print_models(rows)


@app.command()
def gpus(
    text: Annotated[str, typer.Argument(help="Only accelerators with this in their name.", metavar="[TEXT]")] = "",
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """List the accelerators of the catalogue and the node that is assumed for each."""
    from planner import service
    from planner.cli import listings, problems

    rows = service.list_gpus(text)
    problems.print_json(rows) if as_json else listings.print_gpus(rows)


@app.command()
def backends(
    text: Annotated[str, typer.Argument(help="Only frameworks with this in their name.", metavar="[TEXT]")] = "",
    rules: Annotated[bool, typer.Option("--rules", help="List every rule with its source.")] = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Show what each framework can run and the rules it enforces."""
    from planner import service
    from planner.cli import listings, problems

    rows = service.list_backends(text)
    problems.print_json(rows) if as_json else listings.print_backends(rows, rules=rules)


@app.command()
def accuracy(
    records: Annotated[
        list[Path] | None,
        typer.Option("--records", help="Record file (.jsonl, .jsonl.gz); repeatable. Default: the public records."),
    ] = None,
    by: Annotated[str, typer.Option("--by", help="Rows of the table: class, source, gpu or framework.")] = "class",
    profile: o.ProfilePath = None,
    predictions: Annotated[
        Path | None,
        typer.Option("--predictions", help="Write one JSON line a record to this file.", rich_help_panel=o.OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Write a scatter plot (.svg or .png).", rich_help_panel=o.OUTPUT),
    ] = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Compare predictions with measured runs: how wrong is the planner?  Exit code 2 if no record can be read."""
    from planner import service
    from planner.cli import console, problems
    from planner.cli import measured as tables

    request = service.AccuracyRequest(
        records=tuple(records or ()), by=by, profile=profile, predictions=predictions, plot=plot, force=force
    )
    with console.progress(quiet=as_json, what="comparing") as report:
        document = service.accuracy(request, report)
    if as_json:
        problems.print_json(document.to_json_dict())
    else:
        tables.print_accuracy(document, [path for path in (predictions, plot) if path is not None])
    if not document.read:
        raise typer.Exit(InputError.exit_code)


@app.command()
def calibrate(
    context: typer.Context,
    records: Annotated[
        list[Path] | None,
        typer.Option("--from-records", help="Record file of your own runs, one GPU and framework; repeatable."),
    ] = None,
    here: Annotated[
        bool, typer.Option("--on-this-machine", help="Measure this machine; needs torch.", rich_help_panel=o.MEASURED)
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Accelerator; default: the GPUs here, else cpu.", rich_help_panel=o.MEASURED),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            help="Processes that measure at the same time; default: one a GPU, or one a core.",
            rich_help_panel=o.MEASURED,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Measure its matrix shapes, too.", rich_help_panel=o.MEASURED)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens of a sequence.", rich_help_panel=o.MEASURED)
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="bf16, fp16 or fp32.", rich_help_panel=o.MEASURED)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes.", rich_help_panel=o.MEASURED)] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the profile to this YAML file.", rich_help_panel=o.OUTPUT)
    ] = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Fit the machine constants to your own runs, or measure this machine, and write a profile for --profile."""
    from planner import service
    from planner.cli import calibrating, console, problems
    from planner.cli import measured as tables

    calibrating.check_source(context, records=records, here=here)
    if here:
        given = calibrating.Given(gpu, nproc, model, seq_len, precision, quick, out, force)
        with console.progress(quiet=as_json, what="measuring") as report:
            found = calibrating.measure(given, report)
        if as_json:
            problems.print_json(found.model_dump(mode="json"))
        else:
            calibrating.print_machine(found, out)
        return
    with console.progress(quiet=as_json, what="fitting") as report:
        result = service.calibrate(records or (), out=out, force=force, progress=report)
    if as_json:
        problems.print_json(result.model_dump(mode="json"))
    else:
        tables.print_calibration(result, out)


app.add_typer(machines.app, name="cluster")
app.add_typer(serving.tokens, name="tokens")


WITH_A_PLAN = ("plan", "report", "force", "as_json", "debug")
"""Parameters of estimate that mean something beside a plan.json."""


def _only_plan(context: typer.Context) -> None:
    """Refuse options that a plan.json would silently overrule."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in WITH_A_PLAN and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                "a plan.json holds model, machines, job and strategy already",
                where="PLAN.json",
                got=f"{parameter.opts[0]} beside it",
                hint="give either the file or the options",
            )


def _print(document: PlanDocument, as_json: bool, written: Sequence[Path] = (), reports: Sequence[Path] = ()) -> None:
    from planner.cli import output, problems

    if as_json:
        problems.print_json(document.to_json_dict())
    else:
        output.print_document(document, written, reports)
