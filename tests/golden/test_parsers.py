"""Frameworks' own parsers accept what is rendered for them; each test needs its framework and skips without it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.render import render_plan, write_files
from tests.golden.plans import CASES, case_names

pytestmark = pytest.mark.parsers

PYTHON = os.environ.get("PLANNER_TORCH_PYTHON") or sys.executable

DEEPSPEED_CHECK = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
world, replicas = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
import deepspeed.comm as comm
import deepspeed.comm.torch as backend
backend.build_shm_op = lambda: None  # compiles for minutes and is not needed to read a configuration
from deepspeed.runtime.config import DeepSpeedConfig
comm.init_distributed(dist_backend="fake")
class Groups:
    def get_data_parallel_world_size(self):
        return replicas
config = DeepSpeedConfig(json.load(open(sys.argv[1])), Groups())
print(config.train_batch_size)
"""


def has(module: str) -> bool:
    """Whether the interpreter used for the check finds ``module``."""
    if sys.executable == PYTHON:
        return importlib.util.find_spec(module) is not None
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0


@pytest.mark.skipif(not has("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("name", case_names("deepspeed"))
def test_deepspeed_reads_its_configuration(name: str, tmp_path: Path) -> None:
    """DeepSpeedConfig takes the file and, where it counts replicas rightly, derives the plan's global batch."""
    document = CASES[name].document
    strategy = document.best.strategy
    write_files(tmp_path / "out", render_plan(document))
    config = str(tmp_path / "out" / "ds_config.json")
    result = subprocess.run(
        [PYTHON, "-c", DEEPSPEED_CHECK, config, str(strategy.gpus), str(strategy.dp)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    # With AutoTP alone DeepSpeed counts tensor-parallel ranks as replicas, whatever groups it is given.
    counted = strategy.global_batch * (strategy.tp if strategy.tp > 1 else 1)
    assert int(result.stdout.split()[-1]) in (strategy.global_batch, counted)
