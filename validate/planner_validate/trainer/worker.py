"""What every process of a short real run executes under torchrun:
``python -m planner_validate.trainer.worker --config run.json --out DIR``.

It writes ``rank-R.phase`` whenever it starts something new, ``rank-R.json`` when it is done, and
``rank-R.failure.json`` when it cannot go on; rank 0 prints what the run does."""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from planner.specs.base import Spec
from planner.specs.validation import FailureKind, RankFailure, RankResult, RunConfig
from planner_validate.runs.keeper import die_with_parent
from planner_validate.trainer.gradients import check_gradients
from planner_validate.trainer.job_log import JobLog
from planner_validate.trainer.observe import Observer, collective_seconds, summed
from planner_validate.trainer.training import Trainer, build

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
        """Leave what was measured, in place of what was until then."""
        self._write("json", result.model_dump_json())
        (self._folder / f"rank-{self._rank}.partial").unlink(missing_ok=True)

    def partial(self, result: RankResult) -> None:
        """Leave what was measured until now, for a run that does not reach its end."""
        self._write("partial", result.model_dump_json())

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
    # The profiler of the last step otherwise announces itself on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Whatever happens to the launcher, no rank stays behind.
    die_with_parent()
    # Nothing here changes a module's output in place, which is all that this warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    rank = int(os.environ.get("RANK", "0"))
    post = Post(options.out, rank)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        post.phase("start")
        config = RunConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
        log = JobLog(config, rank, options.out)
        post.result(run(config, rank, post, log))
        log.end()
    except BaseException as error:
        report(post, rank, error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def report(post: Post, rank: int, error: BaseException) -> None:
    """Leave a failure file; a full disk leaves the message on standard error only."""
    details = "".join(traceback.format_exception(error)).strip().splitlines()[-DETAIL_LINES:]
    place = module_of(error.__traceback__)
    failure = RankFailure(
        rank=rank,
        kind=kind_of(error),
        phase=f"{post.now}, in {place}" if place else post.now,
        message=str(error) or repr(error),
        details="\n".join(details),
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


def module_of(trace: TracebackType | None) -> str:
    """Name of the innermost module whose forward pass raised, empty in a backward pass and elsewhere."""
    modules: list[nn.Module] = []
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            modules.append(owner)
        trace = trace.tb_next
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    return names.get(id(modules[-1]), type(modules[-1]).__name__) or type(modules[-1]).__name__.lower()


def run(config: RunConfig, rank: int, post: Post, log: JobLog) -> RankResult:
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
    log.start()
    return _measured(config, rank, post, log)


def _measured(config: RunConfig, rank: int, post: Post, log: JobLog) -> RankResult:
    checked = None
    if config.check_gradients:
        post.phase("gradient check")
        checked = check_gradients(config)
        log.gradients(checked)
        # Autograd graphs and hooks of the copy refer to each other.
        gc.collect()
    on_gpu = config.device == "cuda"
    post.phase("building the model")
    trainer = build(config)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result = describe(config, rank, trainer).model_copy(update={"gradients": checked})
    post.partial(result)
    for index in range(config.warmup_steps):
        post.phase(f"warm-up step {index + 1}")
        result = result.model_copy(update={"warmup": (*result.warmup, trainer.step(index))})
        log.step("warm-up step", index, config.warmup_steps, result.warmup[-1])
        post.partial(result)
    for index in range(config.measured_steps):
        post.phase(f"step {index + 1}")
        result = result.model_copy(update={"steps": (*result.steps, trainer.step(config.warmup_steps + index))})
        log.step("step", index, config.measured_steps, result.steps[-1])
        post.partial(result)
    result = result.model_copy(
        update={
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        }
    )
    post.phase("observed step")
    result = _observed(result, trainer, config.warmup_steps + config.measured_steps)
    post.phase("leaving the process group")
    dist.barrier()
    dist.destroy_process_group()
    return result


def _observed(result: RankResult, trainer: Trainer, index: int) -> RankResult:
    """Memory by term and collectives, from two more steps that are not timed.

    On a CPU the sum of live tensors stands for the peak; buffers inside gloo are not among them, as those of NCCL are
    not in what CUDA's allocator counts."""
    with Observer(trainer) as observer:
        trainer.step(index)
    seconds = collective_seconds(trainer, index + 1, observer.calls)
    return result.model_copy(
        update={
            "memory": observer.terms,
            "collectives": summed(observer.calls, seconds),
            "peak_allocated_bytes": result.peak_allocated_bytes or observer.peak,
        }
    )


def describe(config: RunConfig, rank: int, trainer: Trainer) -> RankResult:
    """Who this rank is and what it holds."""
    local = (p.to_local() if hasattr(p, "to_local") else p for _, p in trainer.named_parameters())
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if config.device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return RankResult(
        rank=rank,
        world_size=dist.get_world_size(),
        coordinates=trainer.layout.coordinates,
        host=socket.gethostname(),
        device_name=torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        versions=versions,
        parameters=sum(each.numel() for each in local),
    )


def leave(code: int) -> None:
    """End the process without waiting for threads of collectives that will never finish."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
