"""Reads ``nvidia-smi --query-gpu=... --format=csv`` and ``nvidia-smi -L``: which GPUs there are, how large, how busy.

Memory is the printed number: names lie about it (``80GB`` has 79.6 GiB, an H100 NVL 93.6, rebuilt cards anything)."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping

from planner.errors import InputError
from planner.machines.inventory import Device, Inventory
from planner.machines.text import clean, listed, note, span, warning, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown

TITLE = "nvidia-smi --query-gpu"
COMMAND = (
    "nvidia-smi --query-gpu=index,name,memory.total,memory.used,mig.mode.current,pcie.link.width.current,"
    "pcie.link.width.max --format=csv"
)
HINT = f"the full reading needs: {COMMAND}"
BUSY_MIB = 1024
"""Memory in use above which another program must be running; drivers and monitors take less."""
FULL_WIDTH = 16
"""PCIe lanes of every data-center card and slot, where the text does not give the card's own."""
MAX_DEVICES = 100_000

_FIELD = re.compile(r"^([a-z_.]+)\s*(?:\[([A-Za-z%]+)\])?$")
_ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "memory.total": "memory.total"}
_KNOWN = frozenset(
    {"index", "name", "uuid", "memory.total", "memory.used", "mig.mode.current", "pcie.link.width.current"}
)
_HOST = re.compile(r"^([A-Za-z0-9][\w.-]*):\s+")
"""What pdsh, clush and ansible put before each line."""
_NUMBER = re.compile(r"^([0-9]{1,12})(?:\.[0-9]+)?\s*(MiB|GiB|MB|GB)?$")
_LISTED = re.compile(r"^GPU ([0-9]{1,5}): (.+?) \(UUID: ")
_INSTANCE = re.compile(r"^\s+MIG \S+\s+Device")
_TO_MIB = {"MiB": 1.0, "GiB": 1024.0, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}


def recognises(text: str) -> bool:
    """Whether a header of the query's field names, or a line of ``-L``, is there."""
    lines = clean(text).splitlines()
    return any(_columns(line) is not None or _LISTED.match(_without_host(line)[1]) for line in lines)


def read(text: str, where: str = TITLE) -> Inventory:
    """GPUs of one machine (and how many machines, where several were queried at once)."""
    machines = _listing(text) if _LISTED.search("\n".join(map(_bare, clean(text).splitlines()))) else None
    machines = machines or _query(text, where)
    first = machines[0]
    findings = _about(first)
    if any(_kinds(other) != _kinds(first) for other in machines[1:]):
        findings.append(
            warning("machines-differ", f"the {len(machines)} machines differ in their GPUs; the first is read")
        )
    unnamed = [device.index for device in first if device.memory_mib is None]
    return Inventory(
        source=TITLE,
        devices=tuple(first),
        machines=len(machines) if len(machines) > 1 else None,
        findings=tuple(findings),
        unread=(f"memory of GPU {span(unnamed)}",) if unnamed else (),
    )


def _bare(line: str) -> str:
    return _without_host(line)[1]


def _without_host(line: str) -> tuple[str, str]:
    """Host and the rest of a line that a parallel shell has marked."""
    match = _HOST.match(line)
    if match is None or (match[1] == "GPU"):
        return "", line
    return match[1], line[match.end() :]


def _columns(line: str) -> list[tuple[str, str]] | None:
    """(field, unit) of each column when the line is the header of a query."""
    fields = [_FIELD.match(cell.strip().lower()) for cell in _bare(line).split(",")]
    names = [match[1] if match else "" for match in fields]
    if len(names) < 2 or len(_KNOWN.intersection(_ALIASES.get(name, name) for name in names)) < 2:
        return None
    units = [(cell.partition("[")[2].rstrip("] ") if "[" in cell else "") for cell in _bare(line).split(",")]
    return [(_ALIASES.get(name, name), unit) for name, unit in zip(names, units, strict=True)]


def _query(text: str, where: str) -> list[list[Device]]:
    lines = [line for line in clean(text).splitlines() if line.strip()]
    start = next((number for number, line in enumerate(lines) if _columns(line) is not None), None)
    columns = None if start is None else _columns(lines[start])
    if start is None or columns is None:
        raise InputError(
            "no header with field names is found",
            where=where,
            got=shown(lines[0]) if lines else "nothing",
            allowed="the output of --query-gpu with --format=csv, header included",
            hint=HINT,
        )
    if "name" not in dict(columns) and "memory.total" not in dict(columns):
        raise InputError("neither name nor memory.total was queried", where=where, got=lines[start][:70], hint=HINT)
    machines: dict[object, list[Device]] = {}
    turn = 0
    for line in lines[start + 1 :]:
        if _columns(line) is not None:
            turn += 1
            continue
        host, rest = _without_host(line)
        cells = _cells(rest, columns)
        if cells is None:
            continue
        key = host or turn
        members = machines.setdefault(key, [])
        index = whole(cells.get("index"), MAX_DEVICES)
        if not host and members and index is not None and index <= members[-1].index:
            turn += 1
            members = machines.setdefault(turn, [])
        members.append(_device(cells, len(members) if index is None else index, dict(columns)))
    found = [members for members in machines.values() if members]
    if not found:
        raise InputError("no GPU is listed under the header", where=where, got=lines[start][:70], hint=HINT)
    return found


def _cells(line: str, columns: list[tuple[str, str]]) -> dict[str, str] | None:
    """Cells by field; None for lines that are no row (warnings of the driver, prompts)."""
    try:
        row = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return None
    if len(row) != len(columns):
        return None
    return {name: cell.strip() for (name, _), cell in zip(columns, row, strict=True)}


def _mib(cell: str | None, unit: str) -> int | None:
    """Memory in MiB; None for [N/A], [Not Supported], errors and impossible values."""
    match = _NUMBER.match((cell or "").strip())
    if match is None:
        return None
    value = round(int(match[1]) * _TO_MIB.get(match[2] or unit, 1.0))
    return value if value <= 100_000_000 else None


def _device(cells: Mapping[str, str], index: int, units: Mapping[str, str]) -> Device:
    name = " ".join(cells.get("name", "").split())
    total = _mib(cells.get("memory.total"), units.get("memory.total", ""))
    return Device(
        index=index,
        name=name if name and not name.startswith("[") else None,
        memory_mib=total or None,
        used_mib=_mib(cells.get("memory.used"), units.get("memory.used", "")),
        mig=cells.get("mig.mode.current", "").lower() == "enabled",
        link_width=whole(cells.get("pcie.link.width.current"), 64),
        full_link_width=whole(cells.get("pcie.link.width.max"), 64),
    )


def _listing(text: str) -> list[list[Device]] | None:
    """``nvidia-smi -L``: names only."""
    machines: dict[object, list[Device]] = {}
    turn = 0
    for line in clean(text).splitlines():
        host, rest = _without_host(line)
        match = _LISTED.match(rest)
        members = machines.setdefault(host or turn, [])
        if match is not None:
            if not host and members and int(match[1]) <= members[-1].index:
                turn += 1
                members = machines.setdefault(turn, [])
            members.append(Device(index=int(match[1]), name=" ".join(match[2].split())))
        elif _INSTANCE.match(rest) and members:
            last = members[-1]
            members[-1] = Device(index=last.index, name=last.name, mig=True)
    return [members for members in machines.values() if members] or None


def _kinds(devices: list[Device]) -> Counter[tuple[str | None, int | None]]:
    return Counter((device.name, device.memory_mib) for device in devices)


def _about(devices: list[Device]) -> list[Finding]:
    findings = []
    for device in devices:
        place = f"GPU {device.index}"
        if device.used_mib is not None and device.used_mib > BUSY_MIB:
            findings.append(
                warning(
                    "gpu-in-use",
                    f"GPU {device.index} is in use: {device.used_mib} MiB are taken",
                    where=place,
                    hint="end the other program, or leave the GPU out with CUDA_VISIBLE_DEVICES",
                )
            )
        full = device.full_link_width or FULL_WIDTH
        if device.link_width is not None and device.link_width < full:
            findings.append(
                warning(
                    "pcie-narrow",
                    f"GPU {device.index} uses PCIe x{device.link_width} of x{full}: offload and PCIe collectives are "
                    "slower than planned",
                    where=place,
                    hint="check slot and riser; the width is that of the moment, ask again under load",
                )
            )
    split = [device.index for device in devices if device.mig]
    if split:
        findings.append(
            warning(
                "mig-enabled",
                f"MIG is enabled on GPU {span(split)}: instances cannot train together, so it is not counted",
                where=f"GPU {span(split)}",
                hint=f"to use it whole: nvidia-smi -i {split[0]} -mig 0",
            )
        )
    return [*findings, *_about_kinds(devices)]


def _about_kinds(devices: list[Device]) -> list[Finding]:
    names = Counter(device.name or "unnamed" for device in devices)
    sizes = sorted({device.memory_mib for device in devices if device.memory_mib is not None})
    if len(names) > 1:
        kinds = listed([f"{times} x {name}" for name, times in names.items()], 10)
        smallest = f"; the smallest has {sizes[0]} MiB" if sizes else ""
        return [
            warning(
                "gpus-mixed",
                f"mixed models: {kinds}{smallest}. A plan gives every GPU the same work, so the smallest and "
                "the slowest bind all",
                hint="list the GPUs of the job only: nvidia-smi -i 0,1 --query-gpu=...",
            )
        ]
    if len(sizes) > 1 and sizes[-1] > 1.02 * sizes[0]:
        return [warning("memory-mixed", f"GPUs have {sizes[0]} to {sizes[-1]} MiB; the smallest binds all")]
    if sizes and len(devices) > 1 and any(device.memory_mib is None for device in devices):
        return [note("memory-partly-unknown", "some GPUs do not say how much memory they have")]
    return []
