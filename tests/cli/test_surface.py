"""The set of commands and options is frozen: a change here is a change of the product's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from planner.cli.app import app

SURFACE = Path(__file__).with_name("surface.txt")


def surface() -> list[str]:
    """``command: option`` lines, sorted."""
    group = typer.main.get_command(app)
    lines = [
        f"{name}: {' / '.join([*parameter.opts, *parameter.secondary_opts])}"
        for name, command in commands(group).items()
        for parameter in command.params
    ]
    return sorted([*lines, *(f"planner: {' / '.join(parameter.opts)}" for parameter in group.params)])


def commands(group: Any, before: str = "") -> dict[str, Any]:
    """Every command by its full name, those of groups included."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        found |= commands(command, f"{before}{name} ") if inner else {f"{before}{name}": command}
    return found


def test_commands_and_options() -> None:
    """Commands and options are those of surface.txt; add a line there, and to the changelog, with a new option."""
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines()


def test_every_command_prints_json() -> None:
    """--json exists on every command that has a result."""
    names = {line.split(":")[0] for line in surface()} - {"planner", "serve", "worker"}
    assert {line.split(":")[0] for line in surface() if line.endswith(" --json")} == names
