"""Prints errors for people, and anything as JSON; imports nothing of the planner that could itself fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from planner.cli.console import stderr
from planner.errors import InfeasibleError, PlannerError
from planner.units import gib


def print_json(document: Any) -> None:
    """The document as indented JSON on stdout; NaN cannot occur and would be an error."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_error(error: PlannerError) -> None:
    """An error on stderr: what, where, got, allowed, details, hint."""
    console = stderr()
    hint = error.hint
    body = str(error).split("\n\nhint: ", 1)[0]
    console.print(Text("error: ", style="bold red").append(Text(body, style="default")), soft_wrap=True)
    if isinstance(error, InfeasibleError):
        _print_details(console, error.details)
    if hint:
        console.print(Text(f"\nhint: {hint}", style="cyan"), soft_wrap=True)


def _print_details(console: Console, details: Mapping[str, Any]) -> None:
    for name, miss in details.get("nearest", {}).items():
        console.print(
            Text(
                f"  {name}: nearest miss needs {gib(miss['needed_bytes'])} of {gib(miss['limit_bytes'])} "
                f"{'on a GPU' if miss['where'] == 'gpu' else 'of host memory a node'} ({miss['strategy']})"
            )
        )
    for name, rejected in details.get("rejected", {}).items():
        for rule, times in list(rejected.items())[:5]:
            console.print(Text(f"  {name}: {times:,} rejected by {rule}", style="dim"))
    for change in details.get("relaxations", ()):
        console.print(Text(f"  would work: {change}"))
