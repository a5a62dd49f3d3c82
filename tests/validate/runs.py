"""Runs for the tests: plans of tiny models, results as predicted, a worker that stands in, and a look at what is
left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.plan import PlanDocument
from planner.specs.validation import GradientCheck, RankResult, RunConfig, StepMeasure
from planner_validate.reports.terms import FORWARD_BACKWARD, OPTIMIZER, phase_of, predicted_memory, predicted_times
from planner_validate.runs.launching import Folder, torchrun
from planner_validate.runs.options import Options
from planner_validate.runs.plans import Prepared, prepared

STAND_IN = Path(__file__).with_name("stand_in.py")


TINY = Path(__file__).with_name("tiny.yaml")
TINY_EXPERTS = Path(__file__).with_name("tiny_experts.yaml")

LAYOUTS: dict[str, StrategyInput] = {
    "plain": StrategyInput(zero_stage=0),
    "sharded": StrategyInput(zero_stage=3),
    "kept": StrategyInput(zero_stage=2, micro_batch=2),
    "hybrid": StrategyInput(zero_stage=3, shard_degree=2),
    "tensor": StrategyInput(tp=2, zero_stage=3),
    "stages": StrategyInput(pp=2, zero_stage=0),
    "uneven": StrategyInput(pp=2, zero_stage=3, layers_per_stage="3,1"),
    "chunks": StrategyInput(pp=2, vpp=2, zero_stage=0),
    "recomputed": StrategyInput(zero_stage=3, recompute="full"),
    "experts": StrategyInput(zero_stage=0, ep=2),
}
"""Ways to run a tiny model in four processes."""


@cache
def planned(layout: str = "sharded", gpus: int = 4, gpu: str = "cpu", seq_len: int = 64) -> PlanDocument:
    """A plan of a tiny model for the runner."""
    return estimate(
        str(TINY_EXPERTS if layout == "experts" else TINY),
        ClusterInput(gpu=gpu, gpus=gpus, gpus_per_node=max(gpus, 1)),
        JobInput(seq_len=seq_len, global_batch=16, precision="fp32"),
        LAYOUTS[layout],
        backend="pytorch",
    )


def config(timeout_s: float = 120.0, ranks: int = 2) -> RunConfig:
    """What the stand-in worker reads."""
    document = planned(gpus=ranks)
    return RunConfig(
        model=document.request.model,
        cluster=document.request.cluster,
        job=document.request.job,
        strategy=document.best.strategy,
        device="cpu",
        timeout_s=timeout_s,
    )


def as_predicted(found: Prepared, *, slower: float = 1.0) -> list[RankResult]:
    """Results of ranks that measured what the estimate says; ``slower`` times the whole step."""
    strategy, predicted = found.document.best.strategy, predicted_times(found.estimate.time)
    ranks = []
    for rank in range(strategy.gpus):
        stage = rank // (strategy.tp * strategy.cp * strategy.dp)
        memory = predicted_memory(phase_of(found.estimate.memory.children[stage]))
        steps = tuple(
            StepMeasure(
                seconds=slower * found.estimate.step_time_s,
                forward_backward_s=slower * predicted[FORWARD_BACKWARD],
                optimizer_s=slower * predicted[OPTIMIZER],
                loss=7.0 - number / 10,
            )
            for number in range(5)
        )
        ranks.append(
            RankResult(
                rank=rank,
                world_size=strategy.gpus,
                coordinates={"pp": stage},
                steps=steps,
                device_name="cpu",
                versions={"torch": "2.13.0"},
                peak_allocated_bytes=round(sum(memory.values())),
                memory={term: round(size) for term, size in memory.items()},
                gradients=GradientCheck(
                    parameters=9, largest_relative_error=1e-6, gradient_norm=1.5, reference_norm=1.5
                ),
            )
        )
    return ranks


def found_for(layout: str = "sharded", gpus: int = 4, gpu: str = "cpu") -> Prepared:
    """The plan as the runner takes it."""
    return prepared(planned(layout, gpus, gpu), Options())


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


def hear_signals() -> None:
    """In a child before it starts: signals that this process was told to ignore are none of the child's business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
