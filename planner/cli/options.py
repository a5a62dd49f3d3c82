"""The options that several commands share, each declared once with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InputError

INPUT = "Input"
MACHINES = "Machines"
JOB = "Job"
SEARCH = "Search"
STRATEGY = "Strategy"
OUTPUT = "Output"
MEASURED = "With --on-this-machine"

Model = Annotated[
    str, typer.Option("--model", help="Catalogue name (70b, llama3-70b), Hugging Face config.json or folder, or YAML.")
]
Gpu = Annotated[str | None, typer.Option("--gpu", help="Accelerator, see `planner gpus`.", rich_help_panel=MACHINES)]
Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs of the job.", rich_help_panel=MACHINES)]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Nodes, instead of --gpus.", rich_help_panel=MACHINES)]
GpusPerNode = Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs of a node.", rich_help_panel=MACHINES)]
ClusterPath = Annotated[
    Path | None,
    typer.Option("--cluster", help="YAML file with the machines; options win over it.", rich_help_panel=MACHINES),
]
Nics = Annotated[int | None, typer.Option("--nics", help="NICs of a node.", rich_help_panel=MACHINES)]
NicGbps = Annotated[
    float | None, typer.Option("--nic-gbps", help="Rate of a NIC, Gbit/s, one direction.", rich_help_panel=MACHINES)
]
Oversubscription = Annotated[
    float | None,
    typer.Option("--oversubscription", help="Of the network above the node; 2 halves it.", rich_help_panel=MACHINES),
]
HostMemory = Annotated[
    float | None, typer.Option("--host-memory-gib", help="Host memory of a node, GiB.", rich_help_panel=MACHINES)
]
Price = Annotated[float | None, typer.Option("--price", help="US dollars per GPU-hour.", rich_help_panel=MACHINES)]

SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens of a sequence.", rich_help_panel=JOB)]
GlobalBatch = Annotated[
    str | None,
    typer.Option(
        "--global-batch", help="Sequences of a step (512), or tokens with a suffix (4M, 4Mi).", rich_help_panel=JOB
    ),
]
Precision = Annotated[
    str | None, typer.Option("--precision", help="bf16, fp16, fp8, nvfp4 or fp32.", rich_help_panel=JOB)
]
Loss = Annotated[str, typer.Option("--loss", help="auto, eager, fused or chunked.", rich_help_panel=JOB)]
NoFlash = Annotated[
    bool, typer.Option("--no-flash-attention", help="The attention scores are materialised.", rich_help_panel=JOB)
]
MemoryMargin = Annotated[
    float, typer.Option("--memory-margin", help="Share of the GPU memory to keep free.", rich_help_panel=JOB)
]
Objective = Annotated[str, typer.Option("--objective", help="throughput, memory or cost.", rich_help_panel=SEARCH)]

ProfilePath = Annotated[
    Path | None,
    typer.Option("--profile", help="Machine profile that `planner calibrate` wrote.", rich_help_panel=MACHINES),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)]


def folder(text: str) -> Path:
    """The folder that a text names; an empty one, of a variable that is not set, is none."""
    if not text.strip():
        raise InputError("this is not a folder", where="--out", got=repr(text), allowed="a folder", hint="name one")
    return Path(text)


Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write the files that start the job into this folder.",
        rich_help_panel=OUTPUT,
        parser=folder,
        metavar="PATH",
    ),
]
Report = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        help="Write the plan with its figures to this .html file (one file, no network), or as .md; repeatable.",
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.", rich_help_panel=OUTPUT)]
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="Files beside launch.sh (torchrun): slurm, trainjob (Kubeflow Trainer v2), pytorchjob (Kubeflow v1), "
        "skypilot, mpirun; several with commas.",
        rich_help_panel=OUTPUT,
    ),
]

Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.", rich_help_panel=STRATEGY)]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline stages.", rich_help_panel=STRATEGY)]
Vpp = Annotated[int, typer.Option("--vpp", help="Model chunks of a pipeline rank.", rich_help_panel=STRATEGY)]
Cp = Annotated[
    int,
    typer.Option(
        "--cp", help="Context-parallel ranks, which share one sequence (DeepSpeed: Ulysses).", rich_help_panel=STRATEGY
    ),
]
Ep = Annotated[int, typer.Option("--ep", help="Expert-parallel ranks.", rich_help_panel=STRATEGY)]
Etp = Annotated[int | None, typer.Option("--etp", help="Tensor-parallel ranks of an expert.", rich_help_panel=STRATEGY)]
ZeroStage = Annotated[
    int | None,
    typer.Option("--zero-stage", help="0, 1, 2 or 3 (Megatron-LM: 0, 1; FSDP: 0, 2, 3).", rich_help_panel=STRATEGY),
]
ShardDegree = Annotated[
    int | None, typer.Option("--shard-degree", help="GPUs that ZeRO shards over.", rich_help_panel=STRATEGY)
]
SecondaryShardDegree = Annotated[
    int | None,
    typer.Option(
        "--secondary-shard-degree",
        help="GPUs that hold a second, nearer copy of the weights (DeepSpeed hpZ).",
        rich_help_panel=STRATEGY,
    ),
]
MicroBatch = Annotated[int, typer.Option("--micro-batch", help="Sequences of a micro-batch.", rich_help_panel=STRATEGY)]
SequenceParallel = Annotated[
    bool | None,
    typer.Option("--sequence-parallel/--no-sequence-parallel", help="Default: with tp > 1.", rich_help_panel=STRATEGY),
]
Schedule = Annotated[
    str | None, typer.Option("--schedule", help="1f1b, or interleaved with --vpp.", rich_help_panel=STRATEGY)
]
Recompute = Annotated[
    str,
    typer.Option(
        "--recompute", help="none, selective, selective:MODULES, full or full:LAYERS.", rich_help_panel=STRATEGY
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        "--offload", help="none, cpu, nvme, cpu:SHARE; +parameters for the weights.", rich_help_panel=STRATEGY
    ),
]
LayersPerStage = Annotated[
    str | None,
    typer.Option("--layers-per-stage", help="Layers of each stage: 20,20,20,20.", rich_help_panel=STRATEGY),
]
