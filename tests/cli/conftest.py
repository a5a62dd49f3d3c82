"""Runs the command line in this process and keeps what it printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from planner.cli.main import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Result]

SMALL_JOB = (
    *("--model", "llama-3.1-8b", "--gpus", "16", "--gpu", "h100"),
    *("--seq-len", "4096", "--global-batch", "64"),
)
"""A question that every framework answers at once."""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("suggest", "--gpu", "h100")`` with exit code, stdout and stderr."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(arguments)
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return call


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PLANNER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
