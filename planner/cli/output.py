"""Prints plan documents for people; the numbers are those of the document.

Reads top-down: verdict, ranked plans, where memory and time go, why, assumptions, next command.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from planner.cli.bars import memory_lines, time_lines
from planner.cli.console import stderr, stdout, table
from planner.service import start_commands
from planner.service.ranking import LOSS, ranking
from planner.service.summary import (
    assumption_lines,
    basis_text,
    best_of_others,
    headline,
    host_text,
    memory_text,
    misfit_text,
    search_text,
    speed_text,
)
from planner.service.words import strategy_text
from planner.specs.cluster import Cluster
from planner.specs.plan import OUTSIDE_EXPERIENCE, Estimate, Plan, PlanDocument
from planner.units import duration, gib, memory_unit


def print_document(document: PlanDocument, written: Sequence[Path] = (), reports: Sequence[Path] = ()) -> None:
    """The whole answer of suggest or estimate."""
    console = stdout()
    searched = document.search.status != "estimated"
    _verdict(console, document)
    if searched:
        _ranking(console, document)
    section(console, f"Memory of a GPU (limit {gib(document.best.estimate.memory_limit_bytes)}), est.")
    for line in memory_lines(document.best.estimate, console.width):
        console.print(line)
    host_line(console, document.best, document.request.cluster)
    section(console, f"Time of a step ({duration(document.best.estimate.step_time_s)}), est.")
    for line in time_lines(document.best, console.width):
        console.print(line)
    notes(console, "Why", document.best.why)
    notes(console, "Warnings", document.warnings, style="yellow")
    notes(console, "Assumed", assumption_lines(document.assumptions))
    if searched:
        _search_line(console, document)
    for path in reports:
        console.print(Text(f"\nReport: {path}", style="cyan"), soft_wrap=True)
    _next(console, document, written, reports)


def print_verdict(document: PlanDocument) -> None:
    """The strategy, its speed and whether it fits: the head of the whole answer."""
    _verdict(stdout(), document)


def host_line(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Host memory of a node, where something is offloaded."""
    line = host_text(plan, cluster)
    if line is not None:
        indented(console, line)


def _verdict(console: Console, document: PlanDocument) -> None:
    estimate = document.best.estimate
    console.print(Text(headline(document), style="bold"))
    indented(console, strategy_text(document.best))
    indented(console, speed_text(estimate))
    memory = Text(f"  {memory_text(estimate)}: ")
    console.print(memory.append("fits", style="green") if estimate.fits else _misfit(memory, estimate))
    outside = OUTSIDE_EXPERIENCE in estimate.range_basis
    indented(console, basis_text(estimate), style="yellow" if outside else "dim")


def _misfit(memory: Text, estimate: Estimate) -> Text:
    separator = ", " if estimate.peak_memory_range_bytes[1] > estimate.memory_limit_bytes else ": "
    return memory.append("DOES NOT FIT", style="bold red").append(separator + misfit_text(estimate))


WIDE_COLUMNS = 96
"""Terminals from this width on show the largest loss of each plan."""


def _ranking(console: Console, document: PlanDocument) -> None:
    plans = [document.best, *document.alternatives]
    name, unit = memory_unit(max(plan.estimate.peak_memory_bytes for plan in plans))
    limit = document.best.estimate.memory_limit_bytes / unit
    section(console, f"Plans ({name} of {limit:,.1f}; tok/s of a GPU; all figures est.)")
    columns, rows = ranking(plans)
    shown = [i for i, column in enumerate(columns) if column.name != LOSS or console.width >= WIDE_COLUMNS]
    cells = [[("*" if rank == i == 0 else "") + row[i] for i in shown] for rank, row in enumerate(rows)]
    grid = table([columns[i] for i in shown], cells, marked=0, tight=True)
    console.print(Padding(grid, (0, 0, 0, 2)))
    for line in best_of_others(document):
        indented(console, line, "dim")


def section(console: Console, title: str) -> None:
    """An empty line and a title."""
    console.print()
    console.print(Text(title, style="bold"))


def notes(console: Console, title: str, lines: Sequence[str], style: str = "") -> None:
    """A title and a bullet a line; nothing without lines."""
    if not lines:
        return
    section(console, title)
    for line in lines:
        bullet(console, line, style)


def indented(console: Console, line: str, style: str = "") -> None:
    """A wrapped paragraph, two columns in."""
    console.print(Text(_wrapped(line, console.width, "  "), style=style))


def bullet(console: Console, line: str, style: str = "") -> None:
    """A wrapped line behind a dash."""
    console.print(Text(_wrapped(line, console.width, "  - "), style=style))


def _wrapped(line: str, width: int, first: str) -> str:
    """Broken between words only: options and ids, which have hyphens, stay whole and can be copied."""
    lines = textwrap.wrap(
        line, width, initial_indent=first, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def _search_line(console: Console, document: PlanDocument) -> None:
    console.print()
    console.print(Text(f"Search: {search_text(document.search)}", style="dim"))


def _next(console: Console, document: PlanDocument, written: Sequence[Path], reports: Sequence[Path]) -> None:
    if written:
        print_written(written, document.request.cluster.nodes)
        return
    if document.best.estimate.fits and document.search.status != "estimated":
        report = "" if reports else "--report plan.html for the figures, "
        command = (
            f"add --out FOLDER to write the launch files, {report}or --json > plan.json for `planner render plan.json`"
        )
    else:
        command = "`planner suggest` searches for a better strategy"
    console.print(Text(f"\nNext: {command}", style="cyan"))


def print_lost(lost: Sequence[str], short: Sequence[str], *, beside: bool = False) -> None:
    """What another framework's files do not say, and what does not fit; ``beside`` the result, not in it."""
    console = stderr() if beside else stdout()
    notes(console, "Not carried over, or otherwise there", lost, style="yellow")
    notes(console, "The plan does not fit, or too closely to rely on", short, style="yellow")


def print_written(written: Sequence[Path], nodes: int) -> None:
    """The files that were written and how to start."""
    console = stdout()
    console.print(Text("\nWritten:"))
    for path in sorted(written):
        console.print(Text(f"  {path}", style="cyan"), soft_wrap=True)
    names = {path.name: path for path in written}
    script = names.get("launch.sh")
    if script is not None:
        console.print(Text("Next: README.md says what to install and to set; then", style="cyan"))
        for command in start_commands(names):
            # Every script looks for its neighbours: some in the folder that it is submitted from.
            start = f"cd {shlex.quote(str(script.parent))} && {command}"
            if nodes > 1 and command == "./launch.sh":
                start += "   # on every node"
            console.print(Text(f"  {start}", style="cyan"), soft_wrap=True)


def print_files(files: Mapping[str, str]) -> None:
    """Rendered files one after the other, each under a line with its path."""
    for path, text in files.items():
        sys.stdout.write(f"==> {path} <==\n{text.rstrip()}\n\n")
