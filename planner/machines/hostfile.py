"""Reads hostfiles of MPI and DeepSpeed launchers: hosts and how many processes (GPUs) each takes.

Two spellings exist, ``host slots=8`` (Open MPI, DeepSpeed) and ``host:8`` (MPICH, Intel MPI); a launcher knows one."""

from __future__ import annotations

import re

from planner.errors import InputError
from planner.machines.hostlist import expand, holes
from planner.machines.inventory import Inventory, Node
from planner.machines.text import MAX_GPUS_PER_NODE, clean, listed, note, warning, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown

TITLE = "hostfile"
HINT = "a line looks like: worker-1 slots=8"
MOST_GPUS = 32
"""Slots of a host above which they are processes on CPU cores: no node has so many GPUs."""

_LINE = re.compile(r"^(?:[\w.-]+@)?([\w.\-\[\],]+?)(?::([0-9]{1,6}))?((?:\s+[\w-]+\s*=\s*\S+)*)$", re.ASCII)
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)", re.ASCII)
_COUNTS = ("slots", "max_slots", "max-slots")


def recognises(text: str) -> bool:
    """Whether lines are hosts and at least one says how many slots it has."""
    lines = _lines(text)
    matches = [_LINE.match(line) for _, line in lines]
    return bool(lines) and all(matches) and any(match and (match[2] or "slots" in match[3]) for match in matches)


def _lines(text: str) -> list[tuple[int, str]]:
    """(number, content) of lines that are neither blank nor comments."""
    stripped = [
        (number, line.split("#", 1)[0].strip()) for number, line in enumerate(clean(text).splitlines(), start=1)
    ]
    return [(number, line) for number, line in stripped if line]


def read(text: str, where: str = TITLE) -> Inventory:
    """Hosts and slots; InputError with the line that is neither."""
    slots: dict[str, int | None] = {}
    findings: list[Finding] = []
    colons: list[str] = []
    plain: list[str] = []
    repeated: list[str] = []
    for number, line in _lines(text):
        hosts, count, colon, unknown = _entry(line, f"{where}: line {number}")
        for host in hosts:
            if host in slots:
                repeated.append(host)
                slots[host] = (slots[host] or 1) + (count or 1)
            else:
                slots[host] = count
        (colons if colon else [] if count else plain).extend(hosts)
        findings += [note("setting-unread", f"{key} is not read", where=f"line {number}") for key in unknown]
    if not slots:
        raise InputError("no host is named", where=where, got=shown(text.strip()), hint=HINT)
    if colons:
        findings.append(
            warning(
                "mpich-spelling",
                f"mpich spelling {colons[0]}:{slots[colons[0]]}: DeepSpeed's --hostfile refuses it and "
                "Open MPI takes it for a port",
                where=listed(colons),
                hint=f"write {colons[0]} slots={slots[colons[0]]}",
            )
        )
    if repeated:
        findings.append(
            warning(
                "host-repeated",
                "hosts are named twice: Open MPI adds the slots, DeepSpeed refuses",
                where=listed(repeated),
            )
        )
    if plain and len(plain) < len(slots):
        findings.append(
            warning("slots-missing", "hosts without slots have one, by Open MPI's rule", where=listed(plain), hint=HINT)
        )
    named = any(count is not None for count in slots.values())
    most = max(count or 0 for count in slots.values())
    if most > MOST_GPUS:
        named = False
        findings.append(
            warning(
                "slots-not-gpus",
                f"{most} slots on a host are more than any has GPUs: they are taken for CPU cores, so the GPUs of a "
                "node are not said",
                hint="--gpus-per-node N",
            )
        )
    nodes = tuple(Node(name=host, gpus=(count or 1) if named else None) for host, count in slots.items())
    return Inventory(source=TITLE, nodes=nodes, findings=(*findings, *_about(nodes)))


def _entry(line: str, where: str) -> tuple[tuple[str, ...], int | None, bool, list[str]]:
    """(hosts, slots, whether by a colon, settings that mean nothing here) of one line."""
    match = _LINE.match(line)
    if match is None:
        raise InputError("this line is no host", where=where, got=shown(line), allowed="host slots=N", hint=HINT)
    settings = dict(_SETTING.findall(match[3]))
    stated = settings.get("slots") or settings.get("max_slots") or settings.get("max-slots")
    text = match[2] or stated
    count = whole(text, MAX_GPUS_PER_NODE)
    if text is not None and not count:
        raise InputError(
            "this number of slots cannot be used",
            where=where,
            got=shown(text),
            allowed=f"a whole number from 1 to {MAX_GPUS_PER_NODE}",
            hint="take hosts without GPUs out of the file",
        )
    unknown = [key for key in settings if key not in _COUNTS]
    return expand(match[1], where), count, match[2] is not None, unknown


def _about(nodes: tuple[Node, ...]) -> list[Finding]:
    findings = []
    counts = sorted({node.gpus for node in nodes if node.gpus is not None})
    if len(counts) > 1:
        total = sum(node.gpus or 0 for node in nodes)
        findings.append(
            warning(
                "slots-uneven",
                f"uneven slots: {counts[0]} to {counts[-1]} on {len(nodes)} hosts, {total} in all; a plan needs "
                "the same number on each",
            )
        )
    missing = holes(node.name for node in nodes)
    if missing:
        findings.append(note("node-missing", f"the numbering skips {listed(missing)}: {len(nodes)} hosts"))
    return findings
