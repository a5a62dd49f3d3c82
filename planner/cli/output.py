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
from planner.cli.console import Justify, stderr, stdout, table
from planner.service import start_commands
from planner.service.why import largest_loss
from planner.service.words import recompute_text, strategy_text
from planner.specs.cluster import Cluster
from planner.specs.plan import OUTSIDE_EXPERIENCE, Assumption, Plan, PlanDocument
from planner.units import duration, gib, memory_unit, percent


def print_document(document: PlanDocument, written: Sequence[Path] = ()) -> None:
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
    _next(console, document, written)


def print_verdict(document: PlanDocument) -> None:
    """The strategy, its speed and whether it fits: the head of the whole answer."""
    _verdict(stdout(), document)


def host_line(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Host memory of a node, where something is offloaded."""
    offload = plan.strategy.offload
    if offload.device != "none" or offload.parameters != "none":
        needed, there = plan.estimate.host_memory_bytes_per_node, cluster.host_memory_bytes_per_node
        indented(console, f"host memory of a node: {gib(needed)} of {gib(there)}")


def _verdict(console: Console, document: PlanDocument) -> None:
    plan, request = document.best, document.request
    estimate = plan.estimate
    cluster = request.cluster
    console.print(Text(f"{request.model.name} on {cluster.gpus} x {cluster.accelerator.id}", style="bold"))
    indented(console, strategy_text(plan))
    low, high = estimate.step_time_range_s
    speed = (
        f"est. {duration(estimate.step_time_s)} a step ({duration(low)} to {duration(high)}), "
        f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {percent(estimate.mfu)}"
    )
    if estimate.cost_per_million_tokens is not None:
        speed += f", ${estimate.cost_per_million_tokens:.3g} per million tokens"
    upper = estimate.peak_memory_range_bytes[1]
    memory = (
        f"  est. {gib(estimate.peak_memory_bytes)} peak memory (up to {gib(upper)}) "
        f"of {gib(estimate.memory_limit_bytes)}: "
    )
    indented(console, speed)
    console.print(Text(memory).append("fits", style="green") if estimate.fits else _misfit(memory, document))
    outside = OUTSIDE_EXPERIENCE in estimate.range_basis
    indented(console, f"ranges from {estimate.range_basis}", style="yellow" if outside else "dim")


def _misfit(memory: str, document: PlanDocument) -> Text:
    estimate = document.best.estimate
    over = estimate.peak_memory_range_bytes[1] - estimate.memory_limit_bytes
    line = Text(memory).append("DOES NOT FIT", style="bold red")
    if over > 0:
        return line.append(f", {gib(over)} too much")
    return line.append(f": host memory {gib(estimate.host_memory_bytes_per_node)} a node")


MEMORY = "GiB"
"""Header of the column of peak memory, MiB for tiny plans."""
LOSS = "largest loss"
"""Header of the column that narrow terminals go without."""
WIDE_COLUMNS = 96

Column = tuple[str, Justify, bool]
"""Header, justification, and whether the column is left out when all its values are 1 or absent."""

COLUMNS: tuple[Column, ...] = (
    ("", "right", False),
    ("backend", "left", False),
    ("TP", "right", False),
    ("SP", "left", True),
    ("CP", "right", True),
    ("PP", "right", False),
    ("VPP", "right", True),
    ("EP", "right", True),
    ("DP", "right", False),
    ("ZeRO", "right", False),
    ("mbs", "right", False),
    ("recompute", "left", False),
    ("step s", "right", False),
    ("tok/s", "right", False),
    ("MFU %", "right", False),
    (MEMORY, "right", False),
    (LOSS, "left", False),
)


def _row(rank: int, plan: Plan, unit: float) -> list[str]:
    s, e = plan.strategy, plan.estimate
    loss, share = largest_loss(plan)
    recompute = s.recompute.mode if s.recompute.mode != "full" else recompute_text(s.recompute)
    return [
        f"*{rank}" if rank == 1 else str(rank),
        plan.backend,
        str(s.tp),
        "-" if s.tp == 1 else ("yes" if s.sequence_parallel else "no"),
        str(s.cp),
        str(s.pp),
        str(s.vpp),
        str(s.ep),
        str(s.dp),
        str(s.zero_stage),
        str(s.micro_batch),
        recompute + (" +off" if s.offload.device != "none" else ""),
        f"{e.step_time_s:.3g}" if e.step_time_s < 100 else f"{e.step_time_s:.0f}",
        f"{e.tokens_per_s_per_gpu:,.0f}",
        f"{100 * e.mfu:.1f}",
        f"{e.peak_memory_bytes / unit:.1f}",
        f"{loss} {100 * share:.0f}%" if share else loss,
    ]


def _ranking(console: Console, document: PlanDocument) -> None:
    plans = [document.best, *document.alternatives]
    name, unit = memory_unit(max(plan.estimate.peak_memory_bytes for plan in plans))
    limit = document.best.estimate.memory_limit_bytes / unit
    section(console, f"Plans ({name} of {limit:,.1f}; tok/s of a GPU; all figures est.)")
    rows = [_row(rank, plan, unit) for rank, plan in enumerate(plans, start=1)]
    shown = [
        index
        for index, (_, _, optional) in enumerate(COLUMNS)
        if (not optional or any(row[index] not in ("1", "-") for row in rows))
        and (COLUMNS[index][0] != LOSS or console.width >= WIDE_COLUMNS)
    ]
    headers = [(name if COLUMNS[index][0] == MEMORY else COLUMNS[index][0], COLUMNS[index][1]) for index in shown]
    grid = table(headers, [[row[index] for index in shown] for row in rows], marked=0, tight=True)
    console.print(Padding(grid, (0, 0, 0, 2)))
    for backend, plan in document.by_backend.items():
        if plan is None:
            indented(console, f"{backend}: nothing fits", "dim")
        elif not any(plan == ranked for ranked in plans):
            seconds = duration(plan.estimate.step_time_s)
            indented(
                console, f"best of {backend}: {seconds}, {strategy_text(plan).removeprefix(backend + ': ')}", "dim"
            )


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


def assumption_lines(assumptions: Sequence[Assumption]) -> list[str]:
    """One line a reason: what came from the same place stands together."""
    by_reason: dict[str, list[str]] = {}
    for assumption in assumptions:
        value = assumption.value
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        by_reason.setdefault(assumption.why, []).append(f"{assumption.field.rsplit('.', 1)[-1]} = {shown}")
    return [f"{', '.join(values)}: {why}" for why, values in by_reason.items()]


def _search_line(console: Console, document: PlanDocument) -> None:
    report = document.search
    rejected = sum(report.rejected.values())
    proof = "proven optimal" if report.status == "optimal" else "not proven optimal"
    if report.gap:
        proof += f", at most {percent(report.gap)} from the best"
    console.print()
    console.print(
        Text(
            f"Search: {report.candidates:,} candidates, {rejected:,} rejections by rules, "
            f"{report.solved} solved exactly, {duration(report.seconds)}; {proof} within the cost model.",
            style="dim",
        )
    )


def _next(console: Console, document: PlanDocument, written: Sequence[Path]) -> None:
    if written:
        print_written(written, document.request.cluster.nodes)
        return
    if document.best.estimate.fits and document.search.status != "estimated":
        command = "add --out FOLDER to write the launch files, or --json > plan.json for `planner render plan.json`"
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
