"""Memory of one rank of a plan of any size, measured on one CPU process that allocates none of it.

The rank's own part of the model is built on a process group that talks to nobody and trained under fake tensors, which
have shapes and storages but no memory, through the same schedule and with the same observer as in a real run:
``python -m planner_validate.trainer.fake_rank --config run.json --out DIR --ranks 0,64`` under torchrun, one process
a rank."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.specs.validation import RankResult, RunConfig
from planner_validate.trainer.observe import Observer, summed
from planner_validate.trainer.training import LossScale, Trainer, build
from planner_validate.trainer.worker import Post, leave, report


def main(arguments: list[str] | None = None) -> int:
    """Measure one rank; returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(",")[0])
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--ranks", required=True, help="ranks of the plan, with commas; this process takes one")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    # The launcher's numbers choose the rank and name the files; the plan's group has numbers of its own.
    index = int(os.environ.get("RANK", "0"))
    rank = int(options.ranks.split(",")[index])
    post = Post(options.out, index)
    try:
        post.phase("start")
        config = RunConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
        post.result(measured(config, rank, post))
    except BaseException as error:
        report(post, index, error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def measured(config: RunConfig, rank: int, post: Post) -> RankResult:
    """Memory by term of one step of the rank whose optimizer has its states."""
    torch.set_num_threads(config.threads)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.strategy.gpus)
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        post.phase("building the rank")
        trainer = build(config, values=None, allocating=lambda: mode)
        # Scaled or not, gradients take the same memory; whether they overflowed is a value.
        trainer.scale = LossScale(active=False)
        skip_vote(trainer.schedule)
        with mode:
            _make_states(trainer)
            post.phase("observed step")
            with Traced(trainer) as observer, observer.without_shapes():
                tokens, targets = trainer.batch(0)
                trainer.update(trainer.forward_backward(tokens, targets))
        return RankResult(
            rank=rank,
            world_size=config.strategy.gpus,
            coordinates=trainer.layout.coordinates,
            device_name="fake tensors",
            versions={"torch": torch.__version__, "python": sys.version.split()[0]},
            parameters=sum(_elements(parameter) for _, parameter in trainer.named_parameters()),
            peak_allocated_bytes=observer.peak,
            memory=observer.terms,
            collectives=summed(observer.calls, None),
        )
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


class Traced(Observer):
    """An observer under fake tensors, where tensors that only stand for shapes look like all others."""

    _paused = False

    def _note(self, tensor: Tensor) -> None:
        if not self._paused:
            super()._note(tensor)

    @contextlib.contextmanager
    def without_shapes(self) -> Iterator[None]:
        """Leave out what DTensor makes to find out the shape of a result: tensors of the whole, on no rank."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def quiet(propagator: Any, schema: Any) -> Any:
            self._paused = True
            try:
                return original(propagator, schema)
            finally:
                self._paused = False

        ShardingPropagator._propagate_tensor_meta_non_cached = quiet
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = original


def _make_states(trainer: Trainer) -> None:
    """Give the optimizer the states that it has after a first step."""
    for _, parameter in trainer.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


def _elements(parameter: torch.nn.Parameter) -> int:
    return int((parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel())


def skip_vote(schedule: Any) -> None:
    """Pipeline ranks vote on whether all know their shapes, and read the result; here all do and nobody answers."""
    if schedule is None:
        return

    def settled(stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = settled


if __name__ == "__main__":
    leave(main())
