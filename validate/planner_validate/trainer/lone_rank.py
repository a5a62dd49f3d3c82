"""The work of one rank of a larger plan on one device: its shard, its layers, its micro-batches, its optimizer states.

``python -m planner_validate.trainer.lone_rank --config run.json --out DIR --rank 64`` under torchrun with one process.
The collectives are copies on the device (loopback.py), so times are those of the rank's own work, which waits for
nobody."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from planner.specs.validation import RankResult, RunConfig
from planner_validate.trainer import loopback
from planner_validate.trainer.fake_rank import skip_vote
from planner_validate.trainer.observe import Observer, summed
from planner_validate.trainer.training import Trainer, build
from planner_validate.trainer.worker import Post, describe, leave, report


def main(arguments: list[str] | None = None) -> int:
    """Measure the rank; returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rank", required=True, type=int, help="of the plan")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    # The only process of its launcher names its files by the launcher's number.
    post = Post(options.out, 0)
    try:
        post.phase("start")
        config = RunConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
        post.result(measured(config, options.rank, post))
    except BaseException as error:
        report(post, 0, error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def measured(config: RunConfig, rank: int, post: Post) -> RankResult:
    """Steps of the rank, then one that is observed."""
    torch.set_num_threads(config.threads)
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    # What a copy leaves may be tiny, and the processor is slow on numbers that are almost zero.
    torch.set_flush_denormal(True)
    loopback.join(rank, config.strategy.gpus)
    post.phase("building the rank")
    trainer = build(config)
    skip_vote(trainer.schedule)
    schedules._batch_p2p = _one_by_one
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    warmup, steps = [], []
    for index in range(config.warmup_steps):
        post.phase(f"warm-up step {index + 1}")
        warmup.append(trainer.step(index))
    for index in range(config.measured_steps):
        post.phase(f"step {index + 1}")
        steps.append(trainer.step(config.warmup_steps + index))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (None, None)
    post.phase("observed step")
    result = _observed(config, rank, trainer)
    # Losses of copied values say nothing.
    bare = {"loss": None, "gradient_norm": None}
    result = result.model_copy(
        update={
            "warmup": tuple(step.model_copy(update=bare) for step in warmup),
            "steps": tuple(step.model_copy(update=bare) for step in steps),
            "peak_allocated_bytes": peaks[0] or result.peak_allocated_bytes,
            "peak_reserved_bytes": peaks[1],
        }
    )
    dist.destroy_process_group()
    return result


def _observed(config: RunConfig, rank: int, trainer: Trainer) -> RankResult:
    with Observer(trainer) as observer:
        trainer.step(config.warmup_steps + config.measured_steps)
    return describe(config, rank, trainer).model_copy(
        update={
            "memory": observer.terms,
            "collectives": summed(observer.calls, None),
            "peak_allocated_bytes": observer.peak,
        }
    )


def _one_by_one(operations: list[Any], desc: str | None = None) -> list[Any]:
    """Sends and receives of a pipeline without a batch: there is no peer to meet."""
    done = []
    for each in operations:
        ends = {"group_dst": each.group_peer} if each.op is dist.isend else {"group_src": each.group_peer}
        done.append(each.op(each.tensor, group=each.group, tag=each.tag, **ends))
    return done


if __name__ == "__main__":
    leave(main())
