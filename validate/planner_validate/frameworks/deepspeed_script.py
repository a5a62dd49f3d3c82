"""Trains a rendered DeepSpeed plan for a few steps: the runner's decoder on synthetic tokens, split by DeepSpeed.

``launch.sh`` starts it in the folder of the plan, where ``parallel_setup.py`` holds the plan's Python part,
``ds_config.json`` DeepSpeed's configuration and ``plan_parts.json`` the model.  Tensor parallelism (AutoTP) and Ulysses
take Hugging Face models only and the pipeline a list of layers, so plans with them need a training script of the
user's."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner_validate.trainer.model import INITIAL_SPREAD, Stage
from planner_validate.trainer.training import synthetic_tokens


def main() -> None:
    """Train; the first rank prints a line a step."""
    # The plan's own file, beside which this script starts.
    plan = importlib.import_module("parallel_setup")

    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--steps", type=int, default=8)
    # DeepSpeed's own launcher adds it.
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    parts = json.loads(Path("plan_parts.json").read_text(encoding="utf-8"))
    strategy = Strategy.model_validate(parts["strategy"])
    spec, job = ModelSpec.model_validate(parts["model"]), Job.model_validate(parts["job"])
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    model = _model(plan, spec, strategy)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plan.config())
    for step in range(1, options.steps + 1):
        started = time.perf_counter()
        loss = _step(engine, spec, strategy, job, step)
        get_accelerator().synchronize()
        _tell(step, loss, time.perf_counter() - started)
    dist.barrier()


def _model(plan: Any, spec: ModelSpec, strategy: Strategy) -> nn.Module:
    """The whole decoder; from stage 3 on every rank makes its shard only."""
    with deepspeed.zero.Init(config_dict_or_path=plan.config(), enabled=strategy.zero_stage == 3):
        model = Stage(spec, range(spec.layers))
    if strategy.zero_stage == 3 and spec.tied and model.embedding is not None:
        deepspeed.zero.register_external_parameter(model.head, model.embedding.weight)
    for block in model.layers.values():
        block.recompute = {} if strategy.recompute.mode == "full" else None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            held = getattr(parameter, "ds_tensor", parameter)
            held.fill_(1.0) if "norm" in name else held.normal_(std=INITIAL_SPREAD)
    return model


def _step(engine: Any, spec: ModelSpec, strategy: Strategy, job: Job, step: int) -> Tensor:
    """All micro-batches of one step of this replica; the mean of their losses."""
    rows = strategy.micro_batch * strategy.grad_accum
    tokens = synthetic_tokens(spec.vocab, rows * strategy.dp, job.seq_len, 0, step)
    mine = tokens[dist.get_rank() * rows :][:rows].to(engine.device)
    losses = []
    for part in mine.split(strategy.micro_batch):
        logits = engine(part[:, :-1].contiguous())
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def _tell(step: int, loss: Tensor, seconds: float) -> None:
    mean = loss.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if dist.get_rank() == 0:
        reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        line = f"step {step}  loss {mean.item():.5f}  {seconds:.4f} s  peak {reserved / 2**30:.2f} GiB\n"
        os.write(1, line.encode())


if __name__ == "__main__":
    main()
