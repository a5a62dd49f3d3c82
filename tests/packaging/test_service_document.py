"""docs/service.md against the service: its table of settings, its commands, its scopes, its metrics and its paths."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.service.questions import plan_question
from planner.specs.model import ModelSpec
from planner_api.schemas.questions import PlanBody
from planner_api.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = sorted(
    {
        " ".join(re.sub(r"^(\w+=\S+ )+|^docker exec \w+ ", "", line).partition("#")[0].split())
        for block in BLOCKS
        for line in block.splitlines()
        if re.match(r"(\w+=\S+ |docker exec \w+ )*planner ", line)
    }
)


def table(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def shown(default: Any) -> str:
    """A default as the document writes it."""
    if default is None:
        return "unset"
    if isinstance(default, float):
        return f"{default:g}" if default < 1e6 else f"{default:.0f}"
    return str(default) or "empty"


def test_table_of_settings() -> None:
    """Every setting has a row with its default, in the order of the class, and there is none that does not exist."""
    rows = table("Settings")
    assert [row[0] for row in rows] == [f"`PLANNER_{name.upper()}`" for name in Settings.model_fields]
    for row, (name, field) in zip(rows, Settings.model_fields.items(), strict=True):
        if field.default_factory is None:
            assert row[1] == f"`{shown(field.default)}`", name
        assert len(row[2]) > 10, name


def test_default_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the document names is the one that is used."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("PLANNER_DATABASE_URL", raising=False)
    (row,) = (row for row in table("Settings") if row[0] == "`PLANNER_DATABASE_URL`")
    assert Settings().database_url == row[1].strip("`").replace("~", str(Path.home()))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    """Each command of the document is one, with options that it has."""
    words = shlex.split(command)[1:]
    names = [word for word in words[:2] if not word.startswith("-")] if words[0] == "tokens" else words[:1]
    done = subprocess.run(
        [sys.executable, "-m", "planner", *names, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for word in words:
        assert not word.startswith("--") or word in done.stdout


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in this process with a database of its own; what it prints, and its error where it fails."""
    from planner.cli.main import run

    monkeypatch.setenv("PLANNER_DATABASE_URL", f"sqlite:///{tmp_path}/plans.db")

    def call(*words: str, code: int = 0) -> str:
        assert run(words) == code
        told = capsys.readouterr()
        return told.err if code else told.out

    return call


def test_commands_about_tokens(cli: Callable[..., str]) -> None:
    """In the order of the document they work, and the last one leaves no valid token."""
    for line in next(block for block in BLOCKS if "planner tokens revoke" in block).splitlines():
        cli(*shlex.split(line, comments=True)[1:])
    assert [row["state"] for row in json.loads(cli("tokens", "list", "--json"))] == ["revoked"]


def test_a_name_that_several_tokens_have(cli: Callable[..., str]) -> None:
    """Nothing is revoked, and their ids are told; with an id it is that one; of the rest the name is enough."""
    first, second = (json.loads(cli("tokens", "create", "ci", "--json"))["id"] for _ in range(2))
    told = cli("tokens", "revoke", "ci", code=2)
    assert first in told
    assert second in told
    assert json.loads(cli("tokens", "revoke", first, "--json")) == {"revoked": first}
    assert json.loads(cli("tokens", "revoke", "ci", "--json")) == {"revoked": second}
    assert "no such token" in cli("tokens", "revoke", "ci", code=2)


def test_scopes() -> None:
    """The scopes of the document are those that tokens have, from the narrowest."""
    from planner_api.storage.tokens import SCOPES

    assert [row[0] for row in table("Tokens")] == [f"`{scope}`" for scope in SCOPES]


def test_fields_of_own_models() -> None:
    """Each field of a model is in the table, those that are required in its first row."""
    rows = [re.findall(r"`(\w+)`", row[0]) for row in table("Models of your own")]
    fields = ModelSpec.model_fields
    assert sorted(name for row in rows for name in row) == sorted(fields)
    assert rows[0] == [name for name, field in fields.items() if field.is_required() and name != "name"]
    example = json.loads(re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)[0])
    assert plan_question(PlanBody.model_validate(example).asked(None, 1.0)).request.model.name == "mine"


def test_metrics_and_paths() -> None:
    """What the document says to watch is there: by name, by label, by path."""
    from planner_api.app import create_app
    from planner_api.metrics import Metrics

    metrics = Metrics()
    metrics.planned("plan", 1.0)
    metrics.refused("too-many")
    exposed = metrics.text({"queued": 1}, {"failed": 1})
    for name, _ in table("Monitoring"):
        series, _, label = name.strip("`").partition("{")
        pattern = (
            rf"^{series}(_bucket)?(\{{.*\b{label.rstrip('}')}=.*\}}|\{{.*\}})? " if label else rf"^{series}(_sum)? "
        )
        assert re.search(pattern, exposed.decode(), re.MULTILINE), name
    paths = create_app(Settings(database_url="sqlite://")).openapi()["paths"]
    assert {"/healthz", "/readyz", "/metrics"} <= set(paths)
