"""Reads ``rocm-smi --showtopo`` and ``amd-smi topology``: links between AMD GPUs (XGMI or PCIe), hops, NUMA nodes.

The matrices do not name the GPU; with ``--showproductname --showmeminfo vram`` added to the command the same text does,
and is read."""

from __future__ import annotations

import re

from planner.errors import InputError
from planner.machines.devices import in_use
from planner.machines.inventory import Device, Inventory, Links
from planner.machines.links import components, is_fast
from planner.machines.text import clean, note, span, warning, whole
from planner.specs.finding import Finding
from planner.units import MIB

TITLE = "rocm-smi --showtopo"
NEW_TITLE = "amd-smi topology"
COMMAND = "rocm-smi --showtopo --showproductname --showmeminfo vram"
HINT = f"run `{COMMAND}` and paste all of it"
MAX_DEVICES = 256

_TITLE_LINE = re.compile(r"^(?:=+\s*(.*?)\s*=+|([A-Z ]+) TABLE:)$")
_LABEL = r"(?:GPU[0-9]{1,3}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9])"
"""What stands before a row: the GPU's number, or its place on the PCIe bus."""
_ROW = re.compile(rf"^({_LABEL})\s+(?!{_LABEL})(.+)$")
_FACT = re.compile(r"^GPU\[([0-9]{1,3})\]\s*:\s*(.+?):\s*(.*?)\s*$")
_LINK_TYPE = "link type between two gpus"
_NEW_LINKS = "link type table:"

_Matrix = dict[int, list[str]]


def recognises(text: str) -> bool:
    """Whether a matrix between two GPUs, or ROCm's banner, is there."""
    plain = clean(text).lower()
    return "between two gpus" in plain or "rocm system management interface" in plain or _NEW_LINKS in plain


def read(text: str, where: str = TITLE) -> Inventory:
    """Links, NUMA nodes and, where printed, names and memory; InputError without a matrix of link types."""
    sections, facts = _sections(clean(text))
    links = sections.get(_LINK_TYPE)
    if not links and not any("name" in fact or "memory" in fact for fact in facts.values()):
        raise InputError(
            "no matrix of link types is found",
            where=where,
            got=", ".join(sections) or "no matrix",
            allowed="the part `Link Type between two GPUs`",
            hint=HINT,
        )
    indices = sorted(links or facts)[:MAX_DEVICES]
    matrix = _square(links, indices, where) if links else None
    devices = tuple(_device(index, facts.get(index, {})) for index in indices)
    hops = _numbers(sections.get("hops between two gpus"))
    return Inventory(
        source=NEW_TITLE if _NEW_LINKS in clean(text).lower() else TITLE,
        devices=devices,
        links=None if matrix is None else Links(matrix=matrix),
        findings=(*_about(matrix, indices, hops), *in_use(devices, "HIP_VISIBLE_DEVICES")),
        unread=() if devices[0].name else ("name of the GPUs",),
    )


def _sections(text: str) -> tuple[dict[str, _Matrix], dict[int, dict[str, str]]]:
    """Matrices by their title, and facts by GPU."""
    sections: dict[str, _Matrix] = {}
    facts: dict[int, dict[str, str]] = {}
    title = ""
    for line in text.splitlines():
        heading = _TITLE_LINE.match(line.strip())
        if heading is not None:
            title = heading[1].lower() if heading[2] is None else f"{heading[2].lower()} between two gpus"
            continue
        row = _ROW.match(line.strip())
        if row is not None:
            rows = sections.setdefault(title, {})
            rows[int(row[1][3:]) if row[1].startswith("GPU") else len(rows)] = row[2].split()
            continue
        fact = _FACT.match(line.strip())
        if fact is not None:
            _note_fact(facts.setdefault(int(fact[1]), {}), fact[2].lower(), fact[3])
    return sections, facts


def _note_fact(facts: dict[str, str], key: str, value: str) -> None:
    if key.endswith("numa node"):
        facts["numa"] = value
    elif key in ("card series", "card model", "product name") and not value.startswith("N/A"):
        # A device id stands where the driver does not know the name; a name wins over it.
        if not facts.get("name") or facts["name"].startswith("0x"):
            facts["name"] = " ".join(value.split())
    elif key == "vram total memory (b)":
        facts["memory"] = value
    elif key == "vram total used memory (b)":
        facts["used"] = value


def _square(rows: _Matrix, indices: list[int], where: str) -> tuple[tuple[str, ...], ...]:
    """Link types as one matrix with X on the diagonal."""
    matrix = []
    for position, index in enumerate(indices):
        cells = rows[index]
        if len(cells) != len(rows):
            raise InputError(
                f"the row of GPU{index} has {len(cells)} links for {len(rows)} GPUs", where=where, hint=HINT
            )
        kinds = [cell.upper() for cell in cells[: len(indices)]]
        matrix.append(tuple("X" if column == position else kind for column, kind in enumerate(kinds)))
    return tuple(matrix)


def _mib(value: str | None) -> int | None:
    size = whole(value, 10**12)
    return None if not size else size // MIB


def _device(index: int, facts: dict[str, str]) -> Device:
    return Device(
        index=index,
        name=facts.get("name"),
        memory_mib=_mib(facts.get("memory")),
        used_mib=_mib(facts.get("used")),
        numa=whole(facts.get("numa"), 1024),
    )


def _numbers(rows: _Matrix | None) -> list[int]:
    """Distinct entries off the diagonal (0 is the GPU itself)."""
    cells = {whole(cell, 100) for row in (rows or {}).values() for cell in row}
    return sorted(cell for cell in cells if cell)


def _about(matrix: tuple[tuple[str, ...], ...] | None, indices: list[int], hops: list[int]) -> list[Finding]:
    if matrix is None or len(matrix) < 2:
        return []
    islands = components(matrix, is_fast)
    findings = []
    if len(islands) == len(matrix):
        findings.append(warning("no-xgmi", "no pair is joined by XGMI: all traffic goes through PCIe"))
    elif len(islands) > 1:
        groups = " and ".join(span(tuple(indices[member] for member in island)) for island in islands)
        findings.append(
            warning("xgmi-islands", f"XGMI joins GPUs {groups} only", hint="keep tensor parallelism inside them")
        )
    if len(hops) > 1:
        findings.append(note("hops-differ", f"pairs are {hops[0]} to {hops[-1]} hops apart: near ones are faster"))
    return findings
