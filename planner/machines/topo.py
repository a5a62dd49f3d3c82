"""Reads ``nvidia-smi topo -m``: links between GPUs, which network card is near which GPU, NUMA nodes.

The matrix names neither the GPUs nor rates.  Columns are told apart by the words that can stand in them, not by white
space, because copies lose tabs and glue cells together (NVIDIA/nccl#820, vllm-project/vllm#17516)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.errors import InputError
from planner.machines.inventory import Device, Inventory, Links, Nic
from planner.machines.links import closeness, components, full_groups, is_fast, islands, nvlinks
from planner.machines.text import clean, listed, note, span, warning, whole
from planner.specs.finding import Finding

TITLE = "nvidia-smi topo -m"
MAX_DEVICES = 256
"""GPUs and cards of one machine."""

_LABEL = re.compile(r"(?:GPU|NIC)[0-9]+|mlx[0-9]_(?:bond_)?[0-9]+|\S+")
_GPU = re.compile(r"GPU([0-9]{1,3})")
_LINK = re.compile(r"\s*(X|SYS|SOC|NODE|PHB|PXB|PSB|PIX|NV(?:1[0-9]|[0-9])(?![-,])|NV[1-9])")
"""One cell.  The look-ahead takes ``NV10-19`` apart as NV1 and the CPUs 0-19, which were glued to it."""
_AFFINITY = re.compile(r"CPU\s*Affinity")
_NUMA_COLUMN = re.compile(r"NUMA\s*(?:Affinity|ID)")
_LEGEND = re.compile(r"^\s*(NIC[0-9]+):\s*(\S+)\s*$", re.MULTILINE)
_PEER_ONLY = re.compile(r"^\s*(?:OK|CNS|GNS|TNS)\s*=", re.MULTILINE)
_SWITCHED = 3
"""Closeness up to which a path stays under PCIe switches (PIX, PXB)."""
_MOST_NUMA_DIGITS = 2

HINT = "paste the whole output of `nvidia-smi topo -m`"


@dataclass(frozen=True)
class _Header:
    labels: tuple[str, ...]
    columns: int
    """Columns after the matrix: CPU affinity, NUMA affinity, NUMA id of the GPU's memory."""
    line: int


@dataclass(frozen=True)
class _Row:
    links: tuple[str, ...]
    numa: int | None
    own_numa: bool
    """The GPU's memory is a NUMA node of its own, as on Grace machines."""


def recognises(text: str) -> bool:
    """Whether there is a header of GPUs with a row of links under it."""
    return _header(clean(text).splitlines()) is not None


def read(text: str, where: str = TITLE) -> Inventory:
    """The matrix; InputError where header or rows are missing."""
    plain = clean(text)
    lines = plain.splitlines()
    header = _header(lines)
    if header is None or _PEER_ONLY.search(plain):
        raise InputError(
            "no matrix of GPUs is found" if header is None else "this shows which GPUs may talk to each other, not how",
            where=where,
            allowed="a header with GPU0 GPU1 ... and one row for each",
            hint=HINT,
        )
    rows = _rows(lines[header.line + 1 :], header, where)
    gpus = [column for column, label in enumerate(header.labels) if _GPU.fullmatch(label)]
    order = [int(header.labels[column][3:]) for column in gpus]
    matrix = tuple(tuple(rows[header.labels[row]].links[column] for column in gpus) for row in gpus)
    names = dict(_LEGEND.findall(plain))
    nics = _nics(header, rows, gpus, order, names)
    links = Links(matrix=matrix, rails=_rails(header, rows, gpus, order))
    grace = any(row.own_numa for row in rows.values())
    return Inventory(
        source=TITLE,
        devices=tuple(
            Device(index=index, numa=rows[header.labels[column]].numa)
            for index, column in zip(order, gpus, strict=True)
        ),
        links=links,
        nics=nics,
        findings=(*_about_links(matrix, order, grace), *_about_nics(nics)),
    )


def _header(lines: list[str]) -> _Header | None:
    """The line of column names that a row of links follows."""
    for number, line in enumerate(lines):
        start = line.find("GPU")
        if start < 0 or line[:start].strip(" \t$#>|"):
            continue
        devices, *tail = _AFFINITY.split(line, maxsplit=1)
        labels = tuple(_LABEL.findall(devices.strip(" \t$#>|")))
        if not labels or len(labels) > MAX_DEVICES or len(set(labels)) < len(labels) or not _GPU.fullmatch(labels[0]):
            continue
        if any(_row_start(after, labels[0]) for after in lines[number + 1 : number + 4]):
            columns = 1 + len(_NUMA_COLUMN.findall(tail[0])) if tail else 0
            return _Header(labels, columns, number)
    return None


def _row_start(line: str, label: str) -> bool:
    stripped = line.strip()
    return stripped.startswith(label) and _LINK.match(stripped[len(label) :]) is not None


def _rows(lines: list[str], header: _Header, where: str) -> dict[str, _Row]:
    """Rows of the GPUs by label; those of the cards repeat the columns and are not needed."""
    wanted = [label for label in header.labels if _GPU.fullmatch(label)]
    rows: dict[str, _Row] = {}
    for line in lines:
        match = _GPU.match(line.strip())
        if match is None or match[0] not in wanted or match[0] in rows:
            continue
        row = _row(line.strip()[match.end() :], header)
        if row is None:
            raise InputError(
                f"the row of {match[0]} has not {len(header.labels)} links",
                where=where,
                got=line.strip()[:70],
                allowed="X, SYS, NODE, PHB, PXB, PIX or NV with a number in each column",
                hint=HINT,
            )
        rows[match[0]] = row
    missing = [label for label in wanted if label not in rows]
    if missing:
        raise InputError("rows are missing", where=where, got=f"no row for {listed(missing)}", hint=HINT)
    return rows


def _row(text: str, header: _Header) -> _Row | None:
    links: list[str] = []
    position = 0
    for _ in header.labels:
        match = _LINK.match(text, position)
        if match is None:
            return None
        links.append(match[1])
        position = match.end()
    words = text[position:].split()
    numa = _numa(words, header.columns)
    return _Row(tuple(links), numa, header.columns >= 3 and len(words) >= 2 and whole(words[-1]) is not None)


def _numa(words: list[str], columns: int) -> int | None:
    """NUMA node next to the CPUs, also where both were glued (``32-63,96-1271`` is 32-63,96-127 and node 1)."""
    if columns < 2 or not words:
        return None
    if len(words) >= columns:
        return whole(words[1], 10**_MOST_NUMA_DIGITS)
    glued = words[0].removesuffix("N/A")
    ranges = re.findall(r"([0-9]{1,6})-([0-9]{1,7})", glued)
    if not ranges or not glued.endswith(ranges[-1][1]):
        return None
    low, high = ranges[-1]
    lengths = {int(b) - int(a) for a, b in ranges[:-1]}
    for digits in range(1, _MOST_NUMA_DIGITS + 1):
        end = high[:-digits]
        if end and int(end) > int(low) and (not lengths or int(end) - int(low) in lengths):
            return int(high[-digits:])
    return None


def _nics(
    header: _Header, rows: dict[str, _Row], gpus: list[int], order: list[int], names: dict[str, str]
) -> tuple[Nic, ...]:
    """Every card with the GPUs that share a PCIe switch with it."""
    nics = []
    for column, label in enumerate(header.labels):
        if column not in gpus:
            paths = zip(order, (rows[header.labels[gpu]].links[column] for gpu in gpus), strict=True)
            near = tuple(index for index, link in paths if closeness(link) <= _SWITCHED and not is_fast(link))
            nics.append(Nic(name=names.get(label, label), label=label, near=near))
    return tuple(nics)


def _rails(header: _Header, rows: dict[str, _Row], gpus: list[int], order: list[int]) -> dict[int, str]:
    """The nearest card of each GPU; GPUs that share several cards take different ones."""
    rails: dict[int, str] = {}
    cards = [column for column in range(len(header.labels)) if column not in gpus]
    for index, gpu in zip(order, gpus, strict=True):
        links = rows[header.labels[gpu]].links
        taken = list(rails.values())
        ranked = sorted(cards, key=lambda card: (closeness(links[card]), taken.count(header.labels[card]), card))
        if ranked and closeness(links[ranked[0]]) <= _SWITCHED:
            rails[index] = header.labels[ranked[0]]
    return rails


def _about_nics(nics: tuple[Nic, ...]) -> list[Finding]:
    far = [f"{nic.label} ({nic.name})" if nic.name != nic.label else nic.label for nic in nics if not nic.near]
    if not far:
        return []
    if len(far) == len(nics):
        return [
            note(
                "nic-near-no-gpu",
                "no network card shares a PCIe switch with a GPU, so cards for compute and for storage look alike",
                where=listed(far),
                hint="say how many carry the job: --nics N",
            )
        ]
    return [
        note(
            "nic-not-counted",
            f"{len(far)} of {len(nics)} network cards are near no GPU and are taken for storage or management",
            where=listed(far),
            hint="if they carry the job as well: --nics N",
        )
    ]


def _about_links(matrix: tuple[tuple[str, ...], ...], order: list[int], grace: bool) -> list[Finding]:
    findings = []
    if any(matrix[a][b] != matrix[b][a] for a in range(len(matrix)) for b in range(a)):
        findings.append(
            warning("links-not-symmetric", "two halves of the matrix differ: rows may be mixed up", hint=HINT)
        )
    found = [tuple(order[member] for member in island) for island in islands(matrix)]
    counts = nvlinks(matrix)
    if any(counts):
        findings += _about_nvlink(matrix, order, found, counts)
    elif len(found) > 1 and any(len(island) > 1 for island in found):
        findings.append(
            warning(
                "pcie-islands",
                f"no NVLink; GPUs {_groups(found)} are near each other, other pairs meet in the CPUs",
                hint=_fitting(found),
            )
        )
    elif len(matrix) > 1 and not any(is_fast(link) for row in matrix for link in row):
        findings.append(note("no-nvlink", f"no NVLink: every pair is joined by {matrix[0][1]} over PCIe"))
    if grace and any(counts):
        findings.append(
            note(
                "domain-not-visible",
                "one operating system shows only its own GPUs; the NVLink domain of a rack (72 GPUs of an NVL72) is "
                "not in this matrix",
                hint="`nvidia-smi -q | grep -iA3 fabric` prints ClusterUUID and CliqueId: nodes with the same ones "
                "share a domain; write domain_gpus into the file if it is not the reference's",
            )
        )
    return findings


def _about_nvlink(
    matrix: tuple[tuple[str, ...], ...], order: list[int], found: list[tuple[int, ...]], counts: tuple[int, ...]
) -> list[Finding]:
    """NVLink that does not join all pairs alike."""
    if len(found) > 1:
        alone = [island[0] for island in found if len(island) == 1]
        rest = f"; without a link: {span(alone)}" if alone else ""
        together = [island for island in found if len(island) > 1]
        return [
            warning(
                "nvlink-islands",
                f"NVLink joins GPUs {_groups(together)} only{rest}",
                hint=_fitting(together),
            )
        ]
    if 0 in counts:
        groups = [tuple(order[member] for member in group) for group in full_groups(matrix)]
        whole = groups if len(groups[0]) > 1 else []
        return [
            warning(
                "nvlink-partial",
                "not all pairs are linked by NVLink, traffic between the others takes two steps"
                + (f"; fully linked groups: {_groups(whole)}" if whole else ""),
                hint=f"tensor-parallel groups of {len(whole[0])} fit: --pin tp={len(whole[0])}" if whole else "",
            )
        ]
    if len(counts) > 1:
        return [
            note("nvlink-uneven", f"pairs have {counts[0]} to {counts[-1]} NVLinks; the weakest pair sets the pace")
        ]
    return []


def _groups(groups: list[tuple[int, ...]]) -> str:
    """``0-1 and 2-3``; members that are no neighbours as ``0+2 and 1+3``."""
    shown = [span(group).replace(", ", "+") for group in groups]
    return " and ".join(shown) if len(shown) <= 4 else listed(shown)


def _fitting(groups: list[tuple[int, ...]]) -> str:
    """How to place tensor-parallel groups, and the order of GPUs that makes islands neighbours."""
    size = min(len(group) for group in groups)
    advice = f"keep tensor parallelism inside: --pin tp={size} or smaller"
    flat = [member for group in groups for member in group]
    if flat != sorted(flat):
        advice += f"; make neighbours of them: CUDA_VISIBLE_DEVICES={','.join(map(str, flat))}"
    return advice


def fast_components(matrix: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Groups that NVLink or XGMI connects, by position in the matrix."""
    return components(matrix, is_fast)
