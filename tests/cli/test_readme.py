"""The output shown in the README and the documents is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"(<!-- output of: planner (?P<command>.*?) \(.*?-->\n```text\n)(?P<output>.*?)(```)", re.DOTALL)
EXIT_CODES = {"README.md": 0, "docs/configurations.md": 3}
"""Pages with an example, and how its command ends."""


def timeless(text: str) -> str:
    """``text`` with one space between words and without the search's own seconds, the only figure that may differ."""
    return re.sub(r"solved exactly, [0-9.]+ \w+;", "solved exactly;", " ".join(text.split()))


@pytest.mark.parametrize("name", EXIT_CODES)
def test_example(name: str, cli: Cli, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block equals the output of its command; --update-golden rewrites it."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / name).read_text(encoding="utf-8")
    example = EXAMPLE.search(page)
    assert example is not None
    result = cli(*shlex.split(example["command"]))
    assert result.code == EXIT_CODES[name], result.err
    printed = "".join(line.rstrip() + "\n" for line in result.out.splitlines())
    if request.config.getoption("--update-golden", default=False):
        page = page[: example.start("output")] + printed + page[example.end("output") :]
        (ROOT / name).write_text(page, encoding="utf-8")
        return
    assert timeless(example["output"]) == timeless(printed)
