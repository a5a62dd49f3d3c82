"""What launch scripts beside a configuration say: processes a node, and variables that the framework insists on."""

from __future__ import annotations

import re

from planner.reading.configuration import Files

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


def sets(files: Files, variable: str, value: str) -> bool:
    """Whether a script gives the environment variable this value."""
    wanted = re.compile(rf"\b{re.escape(variable)}=[\"']?{re.escape(value)}[\"']?(\s|;|$)", re.MULTILINE)
    return any(wanted.search(text) for text in scripts(files).values())
