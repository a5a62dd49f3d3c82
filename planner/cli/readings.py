"""Prints what machines say about themselves: facts, findings, the cluster file, what is assumed, the next command."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from planner.cli.console import stdout
from planner.machines import Inventory, Nic, Node, compute_nics
from planner.machines.links import is_fast
from planner.machines.text import listed, span
from planner.service.machines import MachinesReading
from planner.specs.finding import Finding
from planner.specs.plan import Assumption
from planner.units import counted

SHOWN_ALIKE = 3
"""Findings of one kind that are printed."""
_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def print_reading(reading: MachinesReading) -> None:
    """Everything, top-down; an error that ends it is printed by the caller."""
    console = stdout()
    console.print(Text(f"Read from {reading.inventory.source}", style="bold"))
    for label, fact in _facts(reading.inventory):
        _wrapped(console, f"{label:<8}{fact}", "  ", 10)
    _findings(console, reading.findings)
    if reading.inventory.unread:
        _title(console, "Not read")
        _wrapped(console, ", ".join(reading.inventory.unread), "  ", 2)
    if reading.cluster is None:
        console.print()
        return
    _title(console, "Cluster file" + (f", written to {reading.written}" if reading.written else ""))
    for line in reading.to_yaml().splitlines():
        console.print(Text(f"  {line}"), soft_wrap=True)
    if reading.assumptions:
        _title(console, "Assumed (write it into the file where it is wrong)")
    for line in _assumed(reading.assumptions):
        _wrapped(console, line, "  - ", 4)
    _next(console, reading)


def _findings(console: Console, findings: Sequence[Finding]) -> None:
    """The first of each kind with their hints; large clusters have the same one for every node."""
    if findings:
        _title(console, "Findings")
    kinds = Counter(finding.id for finding in findings)
    told: Counter[str] = Counter()
    for finding in findings:
        told[finding.id] += 1
        if told[finding.id] > SHOWN_ALIKE:
            continue
        place = f"{finding.where}: " if finding.where and finding.where not in finding.message else ""
        _wrapped(console, f"{finding.severity}: {place}{finding.message}", "  - ", 4, _STYLES[finding.severity])
        if finding.hint:
            _wrapped(console, finding.hint, "    hint: ", 6, "cyan")
        if told[finding.id] == SHOWN_ALIKE < kinds[finding.id]:
            _wrapped(console, f"{kinds[finding.id] - SHOWN_ALIKE} more like this; --json has all", "    ", 4, "dim")


def _title(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)


def _wrapped(console: Console, line: str, first: str, indent: int, style: str = "") -> None:
    lines = textwrap.wrap(
        line,
        console.width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print(Text("\n".join(lines), style=style))


def _facts(inventory: Inventory) -> list[tuple[str, str]]:
    """Label and one line for each thing that was read."""
    facts = [
        ("GPUs", _gpus(inventory)),
        ("links", _links(inventory)),
        ("NICs", _nics(inventory.nics)),
        ("nodes", _nodes(inventory)),
        ("host", _host(inventory)),
        ("levels", " > ".join(inventory.levels)),
    ]
    return [(label, fact) for label, fact in facts if fact]


def _gpus(inventory: Inventory) -> str:
    if inventory.devices:
        kinds = Counter((device.name or "not named", device.memory_mib) for device in inventory.devices)
        text = ", ".join(
            f"{times} x {name}" + (f" {memory} MiB" if memory else "") for (name, memory), times in kinds.items()
        )
        return text + (f", on each of {inventory.machines} machines" if inventory.machines else "")
    if inventory.alternatives:
        return " or ".join(f"{count} x {name}" for name, count in inventory.alternatives) + " a node"
    named = inventory.product or ""
    return f"{inventory.gpus_per_node} a node, {named or 'not named'}" if inventory.gpus_per_node else named


def _links(inventory: Inventory) -> str:
    if inventory.links is None or len(inventory.links.matrix) < 2:
        return ""
    matrix = inventory.links.matrix
    pairs = Counter(link for row, links in enumerate(matrix) for link in links[row + 1 :])
    if len(pairs) == 1:
        return f"{next(iter(pairs))} between all pairs"
    ordered = sorted(pairs.items(), key=lambda item: (not is_fast(item[0]), item[0]))
    return ", ".join(f"{kind} {times} pairs" for kind, times in ordered)


def _nics(nics: Sequence[Nic]) -> str:
    if not nics:
        return ""
    used = compute_nics(nics)
    rates = sorted({nic.gbps for nic in used if nic.gbps is not None})
    rate = f" at {rates[-1]:g} Gbit/s" if rates else ""
    named = [nic.name + (f" (GPU {span(nic.near)})" if nic.near else "") for nic in used]
    return f"{len(used)} of {len(nics)} carry the job{rate}: {listed(named, 16)}"


def _nodes(inventory: Inventory) -> str:
    if not inventory.nodes:
        return str(inventory.node_count or "")
    usable = [node for node in inventory.nodes if node.usable]
    kinds = Counter(_node(node) for node in usable)
    text = f"{len(usable)} of {len(inventory.nodes)} usable" if len(usable) < len(inventory.nodes) else str(len(usable))
    shapes = "; ".join(f"{times} x {kind}" for kind, times in kinds.items() if kind)
    return f"{text}: {listed([node.name for node in usable], 4)}" + (f" ({shapes})" if shapes else "")


def _node(node: Node) -> str:
    parts = []
    if node.gpus is not None:
        given = node.gpus if node.usable_gpus is None else node.usable_gpus
        parts.append(counted(node.gpus, "GPU") + (f", {given} to give" if given != node.gpus else ""))
    if node.product:
        parts.append(node.product)
    if node.instance:
        parts.append(node.instance)
    return ", ".join(parts)


def _host(inventory: Inventory) -> str:
    memory = [node.host_memory_mib for node in inventory.nodes] + [inventory.host_memory_mib]
    cores = [node.cores for node in inventory.nodes] + [inventory.host_cores]
    sizes = sorted(size / 1024 for size in memory if size)
    counts = sorted(count for count in cores if count)
    parts = []
    if sizes:
        parts.append(f"{sizes[0]:.0f} GiB" if sizes[0] == sizes[-1] else f"{sizes[0]:.0f} to {sizes[-1]:.0f} GiB")
    if counts:
        parts.append(f"{counts[0]} cores" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]} cores")
    return ", ".join(parts)


def _assumed(assumptions: Sequence[Assumption]) -> list[str]:
    """One line a reason: what came from the same place stands together."""
    by_reason: dict[str, list[str]] = {}
    for assumption in assumptions:
        shown = f"{assumption.value:g}" if isinstance(assumption.value, float) else str(assumption.value)
        by_reason.setdefault(assumption.why, []).append(f"{assumption.field.rsplit('.', 1)[-1]} = {shown}")
    return [f"{', '.join(values)}: {why}" for why, values in by_reason.items()]


def _next(console: Console, reading: MachinesReading) -> None:
    if reading.written is None:
        console.print(Text("\nNext: add --out cluster.yaml to write the file", style="cyan"))
        return
    command = f"planner suggest --model MODEL --cluster {shlex.quote(str(reading.written))}"
    console.print(Text(f"\nNext: {command}", style="cyan"), soft_wrap=True)
