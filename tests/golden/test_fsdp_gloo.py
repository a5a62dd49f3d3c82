"""The rendered FSDP module runs: four CPU processes train a tiny model exactly as one process does.

Needs torch: in this environment, or in the interpreter that PLANNER_PARSERS_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner.render import render_plan, write_files
from planner.specs.strategy import Recompute
from tests.golden.plans import LLAMA_8B, SELECTIVE, document
from tests.parsers.interpreter import PYTHON, lacking

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch")),
]

FULL_SHARD: dict[str, Any] = {"dp": 4, "zero_stage": 3, "shard_degree": 4}
TENSOR: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "dp": 2, "zero_stage": 3, "shard_degree": 2}

PLANS: dict[str, tuple[dict[str, Any], Recompute]] = {
    "full-shard-selective": (FULL_SHARD, SELECTIVE),
    "hybrid-kept-weights-full-recompute": (
        {"dp": 4, "zero_stage": 2, "shard_degree": 2},
        Recompute(mode="full", layers_per_stage=(2,)),
    ),
    "tensor-sequence": (TENSOR, Recompute()),
}


def losses(folder: Path, *command: str) -> list[float]:
    """The losses that the example prints."""
    result = subprocess.run(
        [PYTHON, *command, "example_train.py", "--tiny", "--steps", "3"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("losses ")]
    assert result.returncode == 0, result.stderr[-3000:]
    assert lines, result.stdout[-2000:]
    values: list[float] = json.loads(lines[0].removeprefix("losses "))
    return values


def reference(folder: Path) -> list[float]:
    """The same steps in one process."""
    result = subprocess.run(
        [PYTHON, "example_train.py", "--tiny", "--reference", "--steps", "3"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    values: list[float] = json.loads(result.stdout.splitlines()[-1].removeprefix("losses "))
    return values


@pytest.mark.parametrize("name", PLANS)
def test_losses_equal_one_process(name: str, tmp_path: Path) -> None:
    """Three steps of the plan have the losses of a single process on the same samples."""
    strategy, recompute = PLANS[name]
    write_files(tmp_path / "out", render_plan(document("fsdp", strategy, model=LLAMA_8B, recompute=recompute)))
    parallel = losses(tmp_path / "out", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert parallel == pytest.approx(reference(tmp_path / "out"), abs=5e-5)
