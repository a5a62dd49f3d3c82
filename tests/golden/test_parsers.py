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

MEGATRON_CHECK = """
import argparse, sys
from megatron.training.arguments import add_megatron_arguments
add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(sys.argv[1:])
"""


def has(module: str) -> bool:
    """Whether the interpreter used for the check finds ``module``."""
    if sys.executable == PYTHON:
        return importlib.util.find_spec(module) is not None
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0


@pytest.mark.skipif(not has("megatron"), reason="megatron-core is not installed")
@pytest.mark.parametrize("name", case_names("megatron"))
def test_megatron_knows_every_argument(name: str, tmp_path: Path) -> None:
    """Megatron's own argument parser takes all four arrays."""
    write_files(tmp_path / "out", render_plan(CASES[name].document))
    arrays = '"${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${DATA_ARGS[@]}"'
    result = subprocess.run(
        ["bash", "-c", f'source ./megatron_args.sh && exec "$0" -c "$1" {arrays}', PYTHON, MEGATRON_CHECK],
        cwd=tmp_path / "out",
        env={**os.environ, "RANK": "0", "WORLD_SIZE": str(CASES[name].document.best.strategy.gpus)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
