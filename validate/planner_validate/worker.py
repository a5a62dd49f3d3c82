"""What every process of a short real run executes: ``python -m planner_validate.worker --config run.json --out DIR``
under torchrun.

It writes ``rank-R.phase`` whenever it starts something new, ``rank-R.json`` when it is done, and
``rank-R.failure.json`` when it cannot go on; nothing else leaves the process."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from planner.specs.base import Spec
from planner.specs.validation import FailureKind, RankFailure, RankResult, RunConfig, StepMeasure
from planner_validate.gradients import check_gradients
from planner_validate.training import Trainer, build

DETAIL_LINES = 40
"""Last lines of a traceback that are kept."""


class MismatchError(Exception):
    """The processes are not those that the plan asks for."""


class Post:
    """The files of one rank in the folder of results, each replaced in one piece."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.now = "start"

    def phase(self, text: str) -> None:
        """Say what this rank starts."""
        self.now = text
        self._write("phase", text + "\n")

    def result(self, result: Spec) -> None:
        """Leave what was measured."""
        self._write("json", result.model_dump_json())

    def failure(self, failure: RankFailure) -> None:
        """Leave why it ended."""
        self._write("failure.json", failure.model_dump_json())

    def _write(self, suffix: str, text: str) -> None:
        target = self._folder / f"rank-{self._rank}.{suffix}"
        part = target.with_name(target.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(target)


def main(arguments: list[str] | None = None) -> int:
    """Run one rank; returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(arguments)
    # Nothing here changes a module's output in place, which is all that this warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    rank = int(os.environ.get("RANK", "0"))
    post = Post(options.out, rank)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        post.phase("start")
        config = RunConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
        post.result(run(config, rank, post))
    except BaseException as error:
        report(post, rank, error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def report(post: Post, rank: int, error: BaseException) -> None:
    """Leave a failure file; a full disk leaves the message on standard error only."""
    details = "".join(traceback.format_exception(error)).strip().splitlines()[-DETAIL_LINES:]
    failure = RankFailure(
        rank=rank, kind=kind_of(error), phase=post.now, message=str(error) or repr(error), details="\n".join(details)
    )
    sys.stderr.write("\n".join(details) + "\n")
    try:
        post.failure(failure)
    except OSError as full:
        sys.stderr.write(f"rank {rank} could not leave its failure: {full}\n")


def kind_of(error: BaseException) -> FailureKind:
    """The kind of failure that an exception stands for."""
    text = str(error).lower()
    if isinstance(error, MismatchError):
        return "mismatch"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in ("can't allocate memory", "out of memory", "cannot allocate memory")
    ):
        return "out-of-memory"
    if isinstance(error, RuntimeError) and any(words in text for words in ("timed out", "timeout")):
        return "timeout"
    return "error"


def run(config: RunConfig, rank: int, post: Post) -> RankResult:
    """Gradient check, warm-up, measured steps and one observed step of this rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.strategy.gpus:
        raise MismatchError(
            f"the plan is for {config.strategy.gpus} processes (tp * cp * dp * pp), but {world} were started"
        )
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise MismatchError(f"process {local} of this host has no GPU: {torch.cuda.device_count()} are visible")
        torch.cuda.set_device(local)
    post.phase("joining the process group")
    dist.init_process_group("nccl" if config.device == "cuda" else "gloo", timeout=timedelta(seconds=config.timeout_s))
    return _measured(config, rank, post)


def _measured(config: RunConfig, rank: int, post: Post) -> RankResult:
    checked = None
    if config.check_gradients:
        post.phase("gradient check")
        checked = check_gradients(config)
    post.phase("building the model")
    trainer = build(config)
    warmup, steps = [], []
    for index in range(config.warmup_steps):
        post.phase(f"warm-up step {index + 1}")
        warmup.append(trainer.step(index))
    for index in range(config.measured_steps):
        post.phase(f"step {index + 1}")
        steps.append(trainer.step(config.warmup_steps + index))
    return _result(config, rank, trainer, tuple(warmup), tuple(steps)).model_copy(update={"gradients": checked})


def _result(
    config: RunConfig, rank: int, trainer: Trainer, warmup: tuple[StepMeasure, ...], steps: tuple[StepMeasure, ...]
) -> RankResult:
    local = (p.to_local() if hasattr(p, "to_local") else p for _, p in trainer.named_parameters())
    on_gpu = config.device == "cuda"
    return RankResult(
        rank=rank,
        world_size=dist.get_world_size(),
        coordinates=trainer.layout.coordinates,
        host=socket.gethostname(),
        device_name=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions={"torch": torch.__version__, "python": sys.version.split()[0]},
        parameters=sum(each.numel() for each in local),
        warmup=warmup,
        steps=steps,
        peak_allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
    )


def leave(code: int) -> None:
    """End the process without waiting for threads of collectives that will never finish."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
