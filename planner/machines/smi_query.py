"""Reads ``nvidia-smi --query-gpu=... --format=csv``, with its header or without, of one host or of several.

A query that repeats itself (``-l``) and one that several hosts answered look alike: a GPU's own number (uuid, serial)
tells them apart, and where none was asked for, what is taken is told."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping

from planner.errors import InputError
from planner.machines.inventory import Device
from planner.machines.products import agrees
from planner.machines.text import note, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown

TITLE = "nvidia-smi --query-gpu"
COMMAND = (
    "nvidia-smi --query-gpu=index,name,memory.total,memory.used,mig.mode.current,pcie.link.width.current,"
    "pcie.link.width.max --format=csv"
)
HINT = f"the full reading needs: {COMMAND}"
MAX_DEVICES = 100_000

Reading = tuple[list[list[Device]], list[Finding]]
"""GPUs of each machine, and what there is to say about how they were told apart."""

_FIELD = re.compile(r"^([a-z_.]+)\s*(?:\[([A-Za-z%]+)\])?$")
_ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_serial": "serial", "gpu_bus_id": "pci.bus_id"}
_KNOWN = frozenset(
    {"index", "name", "uuid", "memory.total", "memory.used", "mig.mode.current", "pcie.link.width.current"}
)
_HOST = re.compile(r"^([A-Za-z0-9][\w.-]*):\s+")
"""What pdsh, clush and ansible put before each line."""
_NUMBER = re.compile(r"^([0-9]{1,12})(?:\.[0-9]+)?\s*(MiB|GiB|MB|GB)?$")
_NAME = re.compile(r"^(?:NVIDIA|Tesla|Quadro|GeForce|GRID|TITAN)[ -]\S")
"""How a row without a header shows that it is about a GPU."""
_SILENT = frozenset(("[n/a]", "n/a", "[not supported]", "[insufficient permissions]"))
"""What stands in place of a value that the driver does not tell; anything else in brackets is an error."""
_TO_MIB = {"MiB": 1.0, "GiB": 1024.0, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}


def recognises(text: str) -> bool:
    """Whether a header of the query's field names is there."""
    return any(_columns(line) is not None for line in text.splitlines())


def recognises_rows(text: str) -> bool:
    """Whether every row, under the header of a single column or of none, names a GPU in one of its cells."""
    rows = [_row(rest) for _, rest in _bare(text)]
    return bool(rows) and all(sum(_NAME.match(cell) is not None for cell in row) == 1 for row in rows)


def _bare(text: str) -> list[tuple[str, str]]:
    """Host and content of each line, without the header of a query for names only."""
    lines = [without_host(line) for line in text.splitlines() if line.strip()]
    return [(host, rest) for host, rest in lines if _ALIASES.get(rest.strip(), rest.strip()) != "name"]


def without_host(line: str) -> tuple[str, str]:
    """Host and the rest of a line that a parallel shell has marked."""
    match = _HOST.match(line)
    if match is None or match[1] == "GPU":
        return "", line
    return match[1], line[match.end() :]


def _columns(line: str) -> list[tuple[str, str]] | None:
    """(field, unit) of each column when the line is the header of a query."""
    cells = without_host(line)[1].split(",")
    fields = [_FIELD.match(cell.strip().lower()) for cell in cells]
    names = [_ALIASES.get(match[1], match[1]) if match else "" for match in fields]
    if len(names) < 2 or len(_KNOWN.intersection(names)) < 2:
        return None
    units = [(cell.partition("[")[2].rstrip("] ") if "[" in cell else "") for cell in cells]
    return list(zip(names, units, strict=True))


def read(text: str, where: str) -> Reading:
    """The rows under a header, or under several."""
    lines = [line for line in text.splitlines() if line.strip()]
    start, columns = next((number, found) for number, line in enumerate(lines) if (found := _columns(line)) is not None)
    fields = {name for name, _ in columns}
    if not fields & {"name", "memory.total"}:
        raise InputError("neither name nor memory.total was queried", where=where, got=lines[start][:70], hint=HINT)
    machines = _Machines(dict(columns))
    for line in lines[start:]:
        if _columns(line) is not None:
            machines.header()
            continue
        host, rest = without_host(line)
        row = _row(rest)
        cells = {name: cell for (name, _), cell in zip(columns, row, strict=False)}
        if len(row) == len(columns) and ("index" not in cells or whole(cells["index"], MAX_DEVICES) is not None):
            machines.add(host, cells)
    return machines.reading(where, lines[start])


def read_rows(text: str, where: str) -> Reading:
    """Rows without a header: the name shows itself; a number is taken for the memory where that GPU has so much."""
    rows = [(host, _row(rest)) for host, rest in _bare(text)]
    numbered = all(whole(row[0], MAX_DEVICES) is not None for _, row in rows)
    machines = _Machines({})
    for host, row in rows:
        name = next(cell for cell in row if _NAME.match(cell))
        memory = next((cell for cell in row if agrees(name, _mib(cell, "MiB"))), "")
        machines.add(host, {"name": name, "memory.total": memory} | ({"index": row[0]} if numbered else {}))
    found, findings = machines.reading(where, ", ".join(rows[0][1]))
    if all(len(row) == 1 for _, row in rows):
        return found, findings
    told = note(
        "columns-assumed",
        "no header says what the columns are: names are read, and numbers that are the memory such a GPU has",
        hint=HINT,
    )
    return found, [told, *findings]


def _row(line: str) -> list[str]:
    """Cells of a line; none for what the format cannot hold."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
    except csv.Error:
        return []


class _Machines:
    """Rows in the order of the text, given to machines."""

    def __init__(self, units: Mapping[str, str]) -> None:
        self.units = units
        self.turn = 0
        self.headers = 0
        self.repeated = 0
        self.samples = 0
        self.members: dict[object, list[Device]] = {}
        self.places: dict[object, set[str]] = {}
        self.seen: set[str] = set()

    def header(self) -> None:
        """A header starts the GPUs of another machine."""
        self.headers += 1
        self.turn += 1

    def add(self, host: str, cells: Mapping[str, str]) -> None:
        """One GPU; one that was there before is the same again when its own number says so."""
        own = next((cells[key] for key in ("uuid", "serial") if _tells(cells.get(key))), "")
        if own and f"{host} {own}" in self.seen:
            return
        self.seen.add(f"{host} {own}")
        index = whole(cells.get("index"), MAX_DEVICES)
        place = cells.get("pci.bus_id", "") if _tells(cells.get("pci.bus_id")) else cells.get("index", "")
        if place and place in self.places.get(host or self.turn, ()):
            if host or "timestamp" in cells:
                self.samples += 1
                return
            self.turn += 1
            self.repeated += not own
        members = self.members.setdefault(host or self.turn, [])
        self.places.setdefault(host or self.turn, set()).add(place)
        members.append(_device(cells, len(members) if index is None else index, self.units))

    def reading(self, where: str, first: str) -> Reading:
        """What was added."""
        found = [members for members in self.members.values() if members]
        if not found:
            raise InputError("no GPU is listed under the header", where=where, got=shown(first), hint=HINT)
        findings = []
        if self.samples:
            findings.append(note("samples-repeated", "the query repeated itself: the first line of each GPU is read"))
        if self.repeated and self.headers < len(found):
            findings.append(
                note(
                    "machines-assumed",
                    f"the same GPUs come {len(found)} times, which is taken for {len(found)} machines",
                    hint="if the command repeated itself on one (-l): --nodes 1; with uuid in the query they are told "
                    "apart",
                )
            )
        return found, findings


def _tells(cell: str | None) -> bool:
    return bool(cell) and not (cell or "").startswith("[") and (cell or "").upper() not in ("N/A", "0")


def _mib(cell: str | None, unit: str) -> int | None:
    """Memory in MiB; None for [N/A], [Not Supported], errors and impossible values."""
    match = _NUMBER.match((cell or "").strip())
    if match is None:
        return None
    value = round(int(match[1]) * _TO_MIB.get(match[2] or unit, 1.0))
    return value if value <= 100_000_000 else None


def _device(cells: Mapping[str, str], index: int, units: Mapping[str, str]) -> Device:
    name = " ".join(cells.get("name", "").split())
    return Device(
        index=index,
        name=name if name and not name.startswith("[") else None,
        memory_mib=_mib(cells.get("memory.total"), units.get("memory.total", "")) or None,
        used_mib=_mib(cells.get("memory.used"), units.get("memory.used", "")),
        mig=cells.get("mig.mode.current", "").lower() == "enabled",
        failed=name.startswith("[") and name.lower() not in _SILENT,
        link_width=whole(cells.get("pcie.link.width.current"), 64),
        full_link_width=whole(cells.get("pcie.link.width.max"), 64),
    )
