"""The commands of ``planner cluster``: the machine's own words -> a cluster file for ``planner suggest --cluster``.

Each takes one kind of text and, with --with, others about the same machines; ``read`` takes any kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import inputs
from planner.cli import options as o

if TYPE_CHECKING:
    from planner.service import ClusterInput

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    help="Read the machines from what drivers, schedulers and launchers print, and write a cluster file.",
)

Text = Annotated[str, typer.Argument(help="File with the output, or - for standard input.", metavar="[FILE]")]
Texts = Annotated[
    list[str], typer.Argument(help="Files with outputs of any kind; - is standard input.", metavar="FILE...")
]
JobText = Annotated[
    str | None,
    typer.Argument(help="File, - for standard input; without it, the variables of this job.", metavar="[FILE]"),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", help="Another output about the same machines, of any kind; repeatable.", metavar="FILE"),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="Accelerator, where the text does not name it.", rich_help_panel=o.MACHINES),
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", help="Nodes, where the text shows one.", rich_help_panel=o.MACHINES)
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Write the cluster file here (cluster.yaml).", rich_help_panel=o.OUTPUT)
]
Command = Callable[..., None]


def _command(source: str) -> Command:
    """A command that reads one kind of text."""

    def read_one(
        text: Text = "-",
        others: With = None,
        gpu: Gpu = None,
        nodes: Nodes = None,
        gpus_per_node: o.GpusPerNode = None,
        nics: o.Nics = None,
        nic_gbps: o.NicGbps = None,
        oversubscription: o.Oversubscription = None,
        host_memory_gib: o.HostMemory = None,
        price: o.Price = None,
        out: Out = None,
        force: o.Force = False,
        as_json: o.AsJson = False,
        debug: o.Debug = False,
    ) -> None:
        texts = ((text, source), *((name, None) for name in others or ()))
        machines = inputs.cluster(
            gpu, None, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, None
        )
        _run(texts, machines, out, force, as_json)

    return read_one


_ONE_KIND = {
    "topo": "Read `nvidia-smi topo -m`: links between GPUs, and the network cards near them.",
    "smi": "Read `nvidia-smi`, also with --query-gpu=... --format=csv, -q or -L: which GPUs, how large, how busy.",
    "rocm": "Read `rocm-smi --showtopo`, best with --showproductname --showmeminfo vram, or `amd-smi topology`.",
    "hostfile": "Read a hostfile: hosts and slots.",
    "kubernetes": "Read `kubectl get nodes -o json` (or yaml).",
}
for _source, _help in _ONE_KIND.items():
    app.command(f"from-{_source}", help=_help)(_command(_source))


@app.command("from-slurm")
def from_slurm(
    text: JobText = None,
    others: With = None,
    gpu: Gpu = None,
    nodes: Nodes = None,
    gpus_per_node: o.GpusPerNode = None,
    nics: o.Nics = None,
    nic_gbps: o.NicGbps = None,
    oversubscription: o.Oversubscription = None,
    host_memory_gib: o.HostMemory = None,
    price: o.Price = None,
    out: Out = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Read `scontrol show node`, `sinfo`, the SLURM_* variables of a job, or a host list; inside a job no file is
    needed."""
    from planner.service.machines import ENVIRONMENT

    texts = ((ENVIRONMENT if text is None else text, "slurm"), *((name, None) for name in others or ()))
    machines = inputs.cluster(
        gpu, None, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, None
    )
    _run(texts, machines, out, force, as_json)


@app.command("read")
def read(
    texts: Texts,
    gpu: Gpu = None,
    nodes: Nodes = None,
    gpus_per_node: o.GpusPerNode = None,
    nics: o.Nics = None,
    nic_gbps: o.NicGbps = None,
    oversubscription: o.Oversubscription = None,
    host_memory_gib: o.HostMemory = None,
    price: o.Price = None,
    out: Out = None,
    force: o.Force = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Read outputs of any kind about the same machines, ibstat, Kueue, SkyPilot and Ray included."""
    machines = inputs.cluster(
        gpu, None, nodes, gpus_per_node, nics, nic_gbps, oversubscription, host_memory_gib, price, None
    )
    _run(tuple((name, None) for name in texts), machines, out, force, as_json)


def _run(
    texts: tuple[tuple[str, str | None], ...], machines: ClusterInput, out: Path | None, force: bool, as_json: bool
) -> None:
    from planner import service
    from planner.cli import problems, readings

    reading = service.read_cluster(service.MachinesRequest(texts=texts, machines=machines, out=out, force=force))
    if as_json:
        problems.print_json(reading.to_json_dict())
    else:
        readings.print_reading(reading)
    if reading.problem is not None:
        if not as_json:
            problems.print_error(reading.problem)
        raise typer.Exit(reading.problem.exit_code)
