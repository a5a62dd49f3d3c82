"""Reads the reports that ``nvidia-smi`` prints for people: the table without arguments, ``-q``, ``-L`` and
``nvlink --status``.

The table cuts long names (``NVIDIA A100-SXM...``); such a name still counts as far as it goes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from planner.errors import InputError
from planner.machines.inventory import Device
from planner.machines.smi_query import MAX_DEVICES, Reading, without_host
from planner.machines.text import note, span, warning, whole
from planner.specs.finding import Finding

LIST_TITLE = "nvidia-smi -L"
TABLE_TITLE = "nvidia-smi"
LOG_TITLE = "nvidia-smi -q"

_LISTED = re.compile(
    r"^(?:GPU models and configuration: )?GPU ([0-9]{1,5}(?:,[0-9]{1,5}){0,255}): "
    r"(?:(.+?) \(UUID: .*|((?:NVIDIA|Tesla|Quadro|GeForce|GRID|TITAN)[ -].+))$"
)
"""A line of ``-L``, or of the reports about themselves that PyTorch and its users print (collect_env)."""
_INSTANCE = re.compile(r"^\s+MIG \S+\s+Device|devices in MIG mode", re.IGNORECASE)
_LINK = re.compile(r"^\s+Link ([0-9]{1,3}): (?:([0-9.]+) GB/s|<?inactive>?)", re.IGNORECASE)
_BANNER = re.compile(r"^\|\s*NVIDIA-SMI\s+[0-9]", re.MULTILINE)
_GPU_LINE = re.compile(
    r"^\|\s*([0-9]{1,3})\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\."
)
_MEMORY = re.compile(r"\|\s*([0-9]{1,9})MiB\s*/\s*([0-9]{1,9})MiB\s*\|")
_MIG_MODE = re.compile(r"\|\s*(Enabled|Disabled|N/A)\*?\s*\|\s*$")
_ERRORS = 3
"""So many ERR! in a line are a GPU that does not answer; a single one is a broken fan or sensor."""
_LOG = re.compile(r"^=+NVSMI LOG=+\s*$", re.MULTILINE)
_BLOCK = re.compile(r"^GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9]\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^( +)(\S.*?)\s*(?: : (.*?))?\s*$")


def _machines(devices: Iterator[Device]) -> list[list[Device]]:
    """An index that starts again is another machine's."""
    found: list[list[Device]] = []
    for device in devices:
        if not found or device.index <= found[-1][-1].index:
            found.append([])
        found[-1].append(device)
    return found


# -- nvidia-smi -L, nvidia-smi nvlink --status -----------------------------------------------------------------------


def is_list(text: str) -> bool:
    """Whether a line of ``-L`` is there."""
    return any(_LISTED.match(without_host(line)[1]) for line in text.splitlines())


def read_list(text: str, where: str) -> Reading:
    """Names, MIG, and NVLinks where their state is printed."""
    hosts: dict[str, list[str]] = {}
    for line in text.splitlines():
        host, rest = without_host(line)
        hosts.setdefault(host, []).append(rest)
    machines = [machine for lines in hosts.values() for machine in _machines(_listed(lines))]
    return machines, [*_about_links(machines[0]), *_assumed(len(machines), len(hosts), "lists")]


def _assumed(machines: int, certain: int, what: str) -> list[Finding]:
    """That texts one after the other are taken for machines, where nothing else says so."""
    if machines <= certain:
        return []
    return [
        note(
            "machines-assumed",
            f"there are {machines} {what}, which are taken for as many machines",
            hint="if one machine printed them one after the other: --nodes 1",
        )
    ]


def _listed(lines: list[str]) -> Iterator[Device]:
    device: Device | None = None
    for line in lines:
        match = _LISTED.match(line)
        if match is not None:
            if device is not None:
                yield device
            name = " ".join((match[2] or match[3]).split())
            *others, last = (Device(index=int(index), name=name) for index in match[1].split(","))
            yield from others
            device = last
        elif device is not None and _INSTANCE.search(line):
            device = replace(device, mig=True)
        elif device is not None and (link := _LINK.match(line)) is not None:
            device = replace(device, nvlinks=(device.nvlinks or 0) + (link[2] is not None))
    if device is not None:
        yield device


def _about_links(devices: list[Device]) -> list[Finding]:
    counts = Counter(device.nvlinks for device in devices if device.nvlinks is not None)
    if len(counts) < 2:
        return []
    most = max(counts)
    fewer = [device.index for device in devices if device.nvlinks is not None and device.nvlinks < most]
    return [
        warning(
            "nvlink-down",
            f"GPU {span(fewer)} has NVLinks that are down: {min(counts)} of {most} are up",
            where=f"GPU {span(fewer)}",
            hint="the slowest GPU sets the pace of all: reset it, or leave the machine out",
        )
    ]


# -- the table -------------------------------------------------------------------------------------------------------


def is_table(text: str) -> bool:
    """Whether the table's banner and a GPU in it are there."""
    return _BANNER.search(text) is not None and any(_GPU_LINE.match(line) for line in text.splitlines())


def read_table(text: str, where: str) -> Reading:
    """Names, memory, MIG and errors of the table; several tables are several machines."""
    machines = _machines(_rows(text.splitlines()))
    return machines, _assumed(len(machines), 1, "tables")


def _rows(lines: list[str]) -> Iterator[Device]:
    for number, line in enumerate(lines):
        match = _GPU_LINE.match(line)
        if match is None:
            continue
        below = lines[number + 1 : number + 3]
        memory = next((found for row in below if (found := _MEMORY.search(row)) is not None), None)
        mode = next((found[1] for row in below if (found := _MIG_MODE.search(row)) is not None), "")
        yield Device(
            index=int(match[1]),
            name=" ".join(match[2].split()),
            memory_mib=int(memory[2]) or None if memory else None,
            used_mib=int(memory[1]) if memory else None,
            mig=mode == "Enabled",
            failed=sum(row.count("ERR!") for row in (line, *below[:1])) >= _ERRORS,
        )


# -- nvidia-smi -q ---------------------------------------------------------------------------------------------------


def is_log(text: str) -> bool:
    """Whether the banner of ``-q`` is there."""
    return _LOG.search(text) is not None


def read_log(text: str, where: str) -> Reading:
    """Everything about each GPU; a banner for each machine."""
    machines: list[list[Device]] = []
    findings: list[Finding] = []
    for log in _LOG.split(text)[1:]:
        blocks = [_facts(block) for block in _BLOCK.split(log)[1:MAX_DEVICES]]
        devices = [_logged(index, facts) for index, facts in enumerate(blocks)]
        if devices and not machines:
            findings = _about_fabric(blocks)
        machines += [devices] if devices else []
    if not machines or not any(device.name for device in machines[0]):
        raise InputError(
            "the log names no GPU",
            where=where,
            allowed="the whole of nvidia-smi -q",
            hint="without -d, which leaves parts out",
        )
    return machines, [*findings, *_assumed(len(machines), 1, "logs")]


def _facts(block: str) -> dict[str, str]:
    """``FB Memory Usage/Total`` -> value, by the indents of a GPU's block."""
    facts: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in block.splitlines():
        entry = _ENTRY.match(line)
        if entry is None:
            continue
        depth = len(entry[1])
        path = [(other, name) for other, name in path if other < depth]
        if entry[3] is None:
            path.append((depth, entry[2]))
        else:
            facts.setdefault("/".join([name for _, name in path] + [entry[2]]), entry[3].strip())
    return facts


def _logged(index: int, facts: dict[str, str]) -> Device:
    name = facts.get("Product Name", "")
    return Device(
        index=index,
        name=" ".join(name.split()) or None,
        memory_mib=_mib(facts.get("FB Memory Usage/Total")) or None,
        used_mib=_mib(facts.get("FB Memory Usage/Used")),
        mig=facts.get("MIG Mode/Current") == "Enabled",
        failed=facts.get("GPU Recovery Action", "None") not in ("None", "N/A"),
        link_width=_lanes(facts, "Current"),
        full_link_width=_lanes(facts, "Max"),
    )


def _mib(value: str | None) -> int | None:
    return whole((value or "").removesuffix("MiB"), 100_000_000)


def _lanes(facts: dict[str, str], which: str) -> int | None:
    return whole(facts.get(f"PCI/GPU Link Info/Link Width/{which}", "").removesuffix("x"), 64)


def _about_fabric(blocks: list[dict[str, str]]) -> list[Finding]:
    """GPUs behind NVSwitch use NVLink only once the fabric manager has admitted them."""
    states = [(facts.get("Fabric/State", "N/A"), facts.get("Fabric/Status", "N/A")) for facts in blocks]
    bad = [
        index
        for index, (state, status) in enumerate(states)
        if state not in ("N/A", "Completed") or (state == "Completed" and status not in ("Success", "N/A"))
    ]
    if not bad:
        return []
    return [
        warning(
            "fabric-not-ready",
            f"the NVLink fabric of GPU {span(bad)} is not ready (state {states[bad[0]][0]}, {states[bad[0]][1]}): no "
            "traffic goes over NVSwitch",
            where=f"GPU {span(bad)}",
            hint="systemctl status nvidia-fabricmanager",
        )
    ]
