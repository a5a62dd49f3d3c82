"""The set of commands and options is frozen: a change here is a change of the product's interface."""

from __future__ import annotations

from pathlib import Path

import typer.main

from planner.cli.app import app

SURFACE = Path(__file__).with_name("surface.txt")


def surface() -> list[str]:
    """``command: option`` lines, sorted."""
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    lines = [
        f"{name}: {' / '.join([*parameter.opts, *parameter.secondary_opts])}"
        for name, command in commands.items()
        for parameter in command.params
    ]
    return sorted([*lines, *(f"planner: {' / '.join(parameter.opts)}" for parameter in group.params)])


def test_commands_and_options() -> None:
    """Commands and options are those of surface.txt; add a line there, and to the changelog, with a new option."""
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines()


def test_every_command_prints_json() -> None:
    """--json exists on every command."""
    commands = {line.split(":")[0] for line in surface()} - {"planner"}
    assert {line.split(":")[0] for line in surface() if line.endswith(" --json")} == commands
