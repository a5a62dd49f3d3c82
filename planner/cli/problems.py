"""Prints errors for people, and anything as JSON; imports nothing of the planner that could itself fail."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from planner.cli.console import stderr
from planner.errors import InfeasibleError, PlannerError

SHOWN_RULES = 5
"""Rules that an error lists for each framework; JSON has them all."""
SHOWN_REASONS = 2
"""Of these, the ones that are quoted where no candidate was legal."""


def print_json(document: Any) -> None:
    """The document as indented JSON on stdout; NaN cannot occur and would be an error."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


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
    from planner.service.words import miss_text  # loaded already by whatever found that nothing fits

    for name, miss in details.get("nearest", {}).items():
        _line(console, f"{name}: nearest miss {miss_text(miss)}")
    for name, rejected in details.get("rejected", {}).items():
        counts = [f"{rule} {times:,}" for rule, times in list(rejected.items())[:SHOWN_RULES]]
        _line(console, f"{name}: rejected by {', '.join(counts)}" if counts else f"{name}: no candidates")
        if name not in details.get("nearest", {}):
            # Nothing came near the memory limit, so the rules themselves are the answer.
            for reason in list(details.get("reasons", {}).get(name, {}).values())[:SHOWN_REASONS]:
                _line(console, f"{name}: {reason}")
    for change in details.get("relaxations", ()):
        _line(console, f"would work: {change}")


def _line(console: Console, line: str) -> None:
    lines = textwrap.wrap(line, console.width, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    console.print(Text("\n".join(lines)))
