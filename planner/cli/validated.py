"""Prints a validation report for people: verdict, predicted beside measured, gradients, suspects, what to do next.

The numbers and sentences are those of the document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from planner.cli.bars import COLOURS, bar_width
from planner.cli.console import Justify, stderr, stdout, table
from planner.cli.output import indented, notes, section
from planner.service.parts import MEMORY_TERMS
from planner.specs.validation import Comparison, MemoryTerm, ValidationReport
from planner_validate.reports import report as texts

STYLES = {"within": "bold green", "outside": "bold yellow", "failed": "bold red"}
MOST_FAILURES = 6
DETAIL_LINES = 8
_LETTERS = {term.name: term.letter for term in MEMORY_TERMS if term.name in get_args(MemoryTerm)}


def print_report(report: ValidationReport) -> None:
    """The whole report."""
    console = stdout()
    _head(console, report)
    _failures(console, report)
    _terms(console, report)
    _memory(console, report)
    for title, line in (("Gradients", texts.gradient_line(report)), ("Loss", texts.loss_line(report))):
        if line is not None:
            section(console, title)
            indented(console, line, "red" if "NOT" in line else "")
    notes(console, "First suspects", report.suspects, style="yellow")
    notes(console, "Differs from the plan", report.changed, style="yellow")
    notes(console, "Notes", report.notes)
    console.print(Text(f"\nNext: {texts.next_step(report)}", style="cyan"))


def _head(console: Console, report: ValidationReport) -> None:
    request = report.request
    console.print(
        Text(f"{request.model.name} on {report.environment.devices} x {report.environment.device}", style="bold")
    )
    indented(console, texts.strategy_words(report))
    if report.environment.versions:
        indented(console, texts.versions(report), "dim")
    indented(console, texts.headline(report), STYLES[report.verdict])


def _failures(console: Console, report: ValidationReport) -> None:
    if not report.failures:
        return
    section(console, "What went wrong, the first cause first")
    for failure in report.failures[:MOST_FAILURES]:
        indented(console, texts.failure_line(failure), "red")
    if len(report.failures) > MOST_FAILURES:
        indented(console, f"... and {len(report.failures) - MOST_FAILURES} more; --json lists all", "dim")
    details = report.failures[0].details.strip()
    if details:
        section(console, "Last lines of the first")
        for line in details.splitlines()[-DETAIL_LINES:]:
            console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def _terms(console: Console, report: ValidationReport) -> None:
    found = texts.rows(report)
    if not found:
        return
    section(console, "Predicted and measured (error: predicted / measured - 1)")
    modelled = any(each.origin == "modelled" for _, each, _ in found)
    headers: list[tuple[str, Justify]] = [
        ("", "left"),
        ("predicted", "right"),
        ("measured", "right"),
        ("error", "right"),
        ("spread", "right"),
        ("stated range", "left"),
        *([("", "left")] if modelled else []),  # type: ignore[list-item]
    ]
    rows = [
        [name, *texts.row_texts(each, memory=memory), *([_origin(each)] if modelled else [])]
        for name, each, memory in found
    ]
    console.print(Padding(table(headers, rows, tight=False), (0, 0, 0, 2)))


def _origin(found: Comparison) -> str:
    return "" if found.origin == "measured" else found.origin


def _memory(console: Console, report: ValidationReport) -> None:
    """Two bars of letters on one scale: what was predicted of the fullest rank and what it held."""
    # Rows of other ranks carry their stage in the name.
    terms = [term for term in report.memory_terms if term.name in _LETTERS]
    if not terms:
        return
    sides = {
        "predicted": [(term.name, term.predicted) for term in terms],
        "measured": [(term.name, term.measured or 0.0) for term in terms],
    }
    scale = max(sum(size for _, size in side) for side in sides.values())
    if scale <= 0:
        return
    section(console, "Memory of the fullest rank")
    label = max(len(name) for name in sides)
    width = bar_width(console.width, label)
    colours = {term.letter: colour for term, colour in zip(MEMORY_TERMS, COLOURS, strict=True)}
    for name, side in sides.items():
        line, drawn, reached = Text(f"  {name.ljust(label)}  ["), 0, 0.0
        for term, size in side:
            reached += size
            upto = min(round(width * reached / scale), width)
            letter = _LETTERS.get(term, "?")
            line.append(letter * (upto - drawn), style=colours.get(letter, ""))
            drawn = upto
        line.append("." * (width - drawn), style="dim").append(f"] {texts.memory_text(reached):>11}")
        console.print(line)
    console.print(Text("  " + "  ".join(f"{letter} {term}" for term, letter in _LETTERS.items()), style="dim"))


def print_written(written: Sequence[Path], told: Sequence[str], *, beside: bool) -> None:
    """The files that were written and what was not; ``beside`` the result, not in it."""
    console = stderr() if beside else stdout()
    for line in told:
        console.print(Text(line, style="yellow"), soft_wrap=True)
    if not beside:
        for path in written:
            console.print(Text(f"Written: {path}", style="cyan"), soft_wrap=True)
