"""Runs for the tests of the parent side: a small configuration, the stand-in worker, and a look at what is left."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from planner_validate import keeper
from planner_validate.launching import Folder, torchrun

from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.plan import PlanDocument
from planner.specs.validation import RunConfig

STAND_IN = Path(__file__).with_name("stand_in.py")


@cache
def planned(backend: str = "fsdp", gpus: int = 4, gpu: str = "h100") -> PlanDocument:
    """A plan of a small model."""
    return estimate(
        "gpt2-124m",
        ClusterInput(gpu=gpu, gpus=gpus, gpus_per_node=gpus),
        JobInput(seq_len=128, global_batch=16, precision="bf16"),
        StrategyInput(zero_stage=3 if backend == "fsdp" else None),
        backend=backend,
    )


def config(timeout_s: float = 120.0, ranks: int = 2) -> RunConfig:
    document = planned(gpus=ranks)
    return RunConfig(
        model=document.request.model,
        job=document.request.job,
        strategy=document.best.strategy,
        device="cpu",
        timeout_s=timeout_s,
    )


class StandIn:
    """Starts the stand-in worker through torchrun and remembers the folder."""

    def __init__(self, do: str = "") -> None:
        self._do = do
        self.folder: Path | None = None

    def __call__(self, folder: Folder, processes: int) -> Sequence[str]:
        self.folder = folder.root
        return torchrun(folder, processes, (str(STAND_IN), "--do", self._do))

    def left(self, within_s: float = 0.0) -> list[str]:
        """Command lines of processes that still know the folder of the run, zombies included."""
        return processes_of(str(self.folder), within_s)


def processes_of(text: str, within_s: float = 0.0) -> list[str]:
    """Processes whose command line or environment holds a text; waits so long for them to go."""
    end = time.monotonic() + within_s
    while (found := _holding(text)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _holding(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            words = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in words:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def marked(mark: str) -> list[str]:
    """Processes of one run."""
    return [str(process.pid) for process in keeper.marked(mark)]
