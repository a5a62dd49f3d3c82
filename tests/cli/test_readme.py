"""The output shown in the README is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

README = Path(__file__).resolve().parents[2] / "README.md"
EXAMPLE = re.compile(r"(<!-- output of: planner (?P<command>.*?) \(.*?-->\n```text\n)(?P<output>.*?)(```)", re.DOTALL)


def timeless(text: str) -> str:
    """``text`` with one space between words and without the search's own seconds, the only figure that may differ."""
    return re.sub(r"solved exactly, [0-9.]+ \w+;", "solved exactly;", " ".join(text.split()))


def test_example(cli: Cli, request: pytest.FixtureRequest) -> None:
    """The block equals the output of its command; --update-golden rewrites it."""
    page = README.read_text(encoding="utf-8")
    example = EXAMPLE.search(page)
    assert example is not None
    result = cli(*shlex.split(example["command"]))
    assert result.code == 0, result.err
    printed = "".join(line.rstrip() + "\n" for line in result.out.splitlines())
    if request.config.getoption("--update-golden", default=False):
        page = page[: example.start("output")] + printed + page[example.end("output") :]
        README.write_text(page, encoding="utf-8")
        return
    assert timeless(example["output"]) == timeless(printed)
