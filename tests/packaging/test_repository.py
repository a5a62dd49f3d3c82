"""What the repository says about itself is true: README commands, CI script, layers, versions."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from planner import __version__

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def readme_commands() -> list[str]:
    """The lines of the first shell block of the README."""
    block = re.search(r"```sh\n(.*?)```", text("README.md"), re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if line and not line.startswith("#")]


def test_ci_runs_the_commands_of_the_readme() -> None:
    """CI executes exactly the two commands that the README gives."""
    commands = readme_commands()
    assert len(commands) == 2
    lines = text(".ci/run").splitlines()
    for command in commands:
        assert command in lines
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_ci_runs_what_make_check_runs() -> None:
    """`make check` and CI run the same tools."""
    block = re.search(r"^check:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)
    assert block is not None
    for line in block[1].splitlines():
        assert line.strip().replace("$(BIN)", ".venv/bin") in text(".ci/run").splitlines()


def test_changelog_has_this_version() -> None:
    """The version of the package has a section in the changelog."""
    assert f"## [{__version__}]" in text("CHANGELOG.md")


def test_tools_are_pinned() -> None:
    """Every dependency of pyproject.toml has an exact version in constraints.txt, and no package index is named."""
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["api"], *extras["test"]]
    pinned = {line.split("==")[0].lower() for line in text("constraints.txt").splitlines() if "==" in line}
    names = {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in wanted} - {project["name"]}
    assert {name.replace("_", "-") for name in names} <= {name.replace("_", "-") for name in pinned}
    assert "://" not in text("constraints.txt")


def test_every_package_is_a_layer() -> None:
    """A new package inside planner takes a place in the import order."""
    contracts = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = {name for layer in contracts[0]["layers"] for name in re.findall(r"planner\.(\w+)", layer)}
    packages = {path.parent.name for path in (ROOT / "planner").glob("*/__init__.py")}
    assert packages <= layers


def test_every_package_but_the_commands_stays_free_of_the_service() -> None:
    """The contract that keeps web frameworks out names every layer below the command line."""
    contracts = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = {name for layer in contracts[0]["layers"] for name in re.findall(r"planner\.\w+", layer)}
    (kept,) = (contract for contract in contracts if "fastapi" in contract.get("forbidden_modules", ()))
    assert set(kept["source_modules"]) == layers - {"planner.cli"}
