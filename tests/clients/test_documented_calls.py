"""docs/service-examples.md run as written: every shell block against a service, its answer compared with the printed.

Answers are compared by shape: the same names, the same kinds of values, in the same order."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner_api.clients.job_file import JobFile

DOCUMENT = Path(__file__).parents[2] / "docs" / "service-examples.md"
ANY = ["..."]
"""Printed for a list whose items depend on the question."""
END = "=== end of block"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A shell block and the JSON values that are printed below it."""

    script: str
    answers: tuple[Any, ...]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [text for kind, text in _BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")) if kind == language]


def calls() -> list[Call]:
    """Every shell block with the block of JSON that follows it."""
    found = _BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    return [
        Call(text, values(found[index + 1][1]))
        for index, (kind, text) in enumerate(found)
        if kind == "sh" and found[index + 1][0] == "json"
    ]


def values(text: str) -> tuple[Any, ...]:
    """The JSON values that stand one after the other; lines of anything else count as texts."""
    decoder, made, position = json.JSONDecoder(), [], 0
    while (rest := text[position:].lstrip()) != "":
        position = len(text) - len(rest)
        try:
            value, length = decoder.raw_decode(rest)
        except ValueError:
            value, length = rest.splitlines()[0], len(rest.splitlines()[0])
        made.append(value)
        position += length
    return tuple(made)


def differs(printed: Any, real: Any, place: str = "") -> str:
    """Where two values are not of one shape; empty where they are."""
    if printed == ANY and isinstance(real, list) and real:
        return ""
    if isinstance(printed, dict) and isinstance(real, dict):
        if set(printed) != set(real):
            return f"{place}: names {sorted(real)}"
        return next(filter(None, (differs(printed[key], real[key], f"{place}/{key}") for key in printed)), "")
    if isinstance(printed, list) and isinstance(real, list):
        if bool(printed) != bool(real):
            return f"{place}: {len(real)} items"
        return next(filter(None, (differs(printed[0], item, f"{place}/{n}") for n, item in enumerate(real))), "")
    kinds = [
        float if isinstance(value, int) and not isinstance(value, bool) else type(value) for value in (printed, real)
    ]
    return "" if kinds[0] is kinds[1] else f"{place}: {real!r} is not like {printed!r}"


@pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("bash", "curl", "jq", "tar")), reason="needs curl, jq and tar"
)
def test_every_call_answers_as_printed(service_url: str, tmp_path: Path) -> None:
    """The blocks run in one shell, in order; each prints what the document shows."""
    known = calls()
    assert len(known) == len(blocks("sh")), "a shell block without its answer"
    script = "set -euo pipefail\n" + "".join(f"{call.script}\necho {END!r}\n" for call in known)
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**variables, "PLANNER_URL": service_url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout.split(f"{END}\n")
    stopped = known[min(len(printed), len(known)) - 1].script
    assert done.returncode == 0, f"{done.stderr}\n{printed[-1]}\nin:\n{stopped}"
    for call, text in zip(known, printed, strict=False):
        real = values(text)
        assert len(real) == len(call.answers), f"{call.script}\n{text}"
        for wanted, got in zip(call.answers, real, strict=True):
            assert differs(wanted, got) == "", f"{call.script}\n{text}"


def test_fixed_words_are_those_of_the_service(service_url: str) -> None:
    """States, outcomes, problem types and links that the document prints are real, not only of the right kind."""
    text = DOCUMENT.read_text(encoding="utf-8")
    from planner_api.problems import TITLES

    named = set(re.findall(r"urn:planner:problem:([a-z-]+)", text))
    assert named
    assert named <= set(TITLES)


@pytest.mark.parametrize(
    ("printed", "real"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": "x"}),
        ({"a": 1}, {"a": True}),
        ({"a": [1]}, {"a": []}),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"c": 1}]}),
        ({"a": None}, {"a": 1}),
        (ANY, []),
        ("x", 304),
    ],
    ids=str,
)
def test_shapes_that_differ(printed: Any, real: Any) -> None:
    """The comparison can fail."""
    assert differs(printed, real)


def test_the_endpoints_are_all_there() -> None:
    """Every route of the API, but for the page and single records, has its call on this page."""
    from planner_api.app import create_app

    text = "".join(blocks("sh")).replace("$ID", "{plan}")
    paths = {re.sub(r"\{name:path\}|\{name\}", "job.sbatch", path) for path in create_app().openapi()["paths"]}
    wanted = {path for path in paths if path.startswith("/v1/") or path in ("/healthz", "/readyz", "/metrics")}
    missing = {path for path in wanted if f"$PLANNER_URL{path}" not in text} - {"/v1/measurements/{record}"}
    assert missing == set()


def test_the_job_file_is_one() -> None:
    """The job file of the document is read without a complaint."""
    (text,) = blocks("yaml")
    job = JobFile.model_validate(yaml.safe_load(text))
    assert job.reads_slurm
    assert job.slurm.time == "1-00:00:00"


def test_the_python_client_as_printed(service_url: str, tmp_path: Path) -> None:
    """The Python block runs, with the address of this service."""
    (text,) = blocks("python")
    script = text.replace("http://127.0.0.1:8000", service_url) + "\nprint(sorted(files))\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "job.sbatch" in done.stdout
