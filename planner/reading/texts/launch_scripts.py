"""What launch scripts beside a configuration say: processes a node, and variables that the framework insists on."""

from __future__ import annotations

import re

from planner.reading.configuration import Files
from planner.specs.finding import Finding

_NODES = re.compile(r"--nnodes[= ]+(\d{1,6})\b(?!:)")
_PROCESSES = re.compile(r"--nproc[-_]per[-_]node[= ]+(\d{1,5})\b")


def scripts(files: Files) -> dict[str, str]:
    """The shell scripts among the files."""
    return {name: text for name, text in files.items() if name.endswith((".sh", ".sbatch", ".slurm"))}


def processes_per_node(files: Files) -> int | None:
    """``--nproc-per-node`` of torchrun, where one of the scripts has it as a number."""
    for text in scripts(files).values():
        found = _PROCESSES.search(text)
        if found and int(found[1]) > 0:
            return int(found[1])
    return None


def processes(files: Files) -> int | None:
    """All processes that torchrun starts, where a script says so in numbers."""
    for text in scripts(files).values():
        local, nodes = _PROCESSES.search(text), _NODES.search(text)
        if local and (nodes or "--standalone" in text):
            return int(local[1]) * (int(nodes[1]) if nodes else 1) or None
    return None


def wrong_world_size(files: Files, product: str, gpus: int | None, where: str) -> tuple[Finding, ...]:
    """The finding that a script starts another number of processes than the degrees multiply to, if it does."""
    started = processes(files)
    if started is None or gpus is None or started == gpus:
        return ()
    return (
        Finding(
            id="world-size",
            severity="error",
            message=f"{product} = {gpus}, but the launch script starts {started} process{'es' if started > 1 else ''}",
            where=where,
            allowed=f"degrees whose product is {started}",
            hint="change one of the degrees, or --nnodes and --nproc-per-node",
        ),
    )


def sets(files: Files, variable: str, value: str) -> bool:
    """Whether a script gives the environment variable this value."""
    wanted = re.compile(rf"\b{re.escape(variable)}=[\"']?{re.escape(value)}[\"']?(\s|;|$)", re.MULTILINE)
    return any(wanted.search(text) for text in scripts(files).values())
