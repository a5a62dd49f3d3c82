"""The use case behind ``planner cluster``: texts about machines -> what they say, a cluster file, and what is assumed.

Reading and writing are apart: what was read is told even where no cluster file can be made of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.machines import SOURCES, Inventory, combine, read_machines
from planner.machines.slurm import from_environment
from planner.machines.text import MAX_TEXT_BYTES, decode
from planner.service.clusters import checked_options, resolve_file
from planner.service.machine_facts import fill
from planner.service.machine_values import Facts
from planner.service.outputs import check_target, write_file
from planner.service.requests import ClusterInput
from planner.specs.cluster_file import ClusterFile
from planner.specs.finding import Finding
from planner.specs.plan import Assumption
from planner.specs.problems import shown, unreadable
from planner.version import __version__

SCHEMA_VERSION = 1
STDIN = "-"
ENVIRONMENT = "environment"
MAX_TEXTS = 64
_WIDTH = 34
"""Column of the origins in the file."""


@dataclass(frozen=True, kw_only=True)
class MachinesRequest:
    """Which texts, what the user states beside them, and where the file goes."""

    texts: tuple[tuple[str, str | None], ...]
    """(file or ``-`` or ``environment``, kind of text or None where it is to be recognised)."""
    machines: ClusterInput = field(default_factory=ClusterInput)
    out: Path | None = None
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class MachinesReading:
    """What the texts say, and the cluster file that follows from it."""

    inventory: Inventory
    cluster: ClusterFile | None
    """None where ``problem`` says why there is none."""
    origins: Mapping[str, str]
    """Field of the cluster file -> where its value was read."""
    as_reference: tuple[str, ...]
    """What was read and equals the reference system, so that the file leaves it out."""
    assumptions: tuple[Assumption, ...]
    findings: tuple[Finding, ...]
    problem: InputError | None
    written: Path | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """The document that ``--json`` prints; the error stands in it beside what was read."""
        read = asdict(self.inventory)
        for part in ("findings", "unread"):
            read.pop(part)
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "planner_version": __version__,
            "read": read,
            "cluster": None if self.cluster is None else self.cluster.model_dump(exclude_none=True),
            "origins": dict(self.origins),
            "as_reference": list(self.as_reference),
            "assumptions": [assumption.model_dump(mode="json") for assumption in self.assumptions],
            "findings": [finding.told() for finding in self.findings],
            "unread": list(self.inventory.unread),
            "written": None if self.written is None else str(self.written),
        }
        return document if self.problem is None else {**document, **self.problem.to_dict()}

    def to_yaml(self) -> str:
        """The cluster file, every value with where it was read."""
        if self.cluster is None:
            return ""
        lines = [
            f"# Read from {self.inventory.source} by planner {__version__}.",
            "# Options of the command line win over it.",
        ]
        lines += [f"# As the reference system: {fact}." for fact in self.as_reference]
        for name, value in self.cluster.model_dump(exclude_none=True).items():
            shown_value = f"{value:g}" if isinstance(value, float) and abs(value) < 1e5 else str(value)
            lines.append(f"{name}: {shown_value}".ljust(_WIDTH) + f"  # {self.origins.get(name, 'option')}")
        return "\n".join(lines) + "\n"


def read_cluster(request: MachinesRequest) -> MachinesReading:
    """Read the texts, make a cluster file of them and write it where the request says.

    Raises InputError for texts that cannot be read and files that cannot be written; that the text does not suffice for
    a cluster file is in the reading's ``problem``."""
    options = ClusterFile(**checked_options(request.machines))
    if request.out is not None:
        inputs = [(Path(name), "the text") for name, _ in request.texts if name not in (STDIN, ENVIRONMENT)]
        check_target(request.out, "--out", force=request.force, others=inputs)
    inventory = combine(_inventories(request.texts))
    reading = _reading(inventory, options)
    if request.out is None or reading.cluster is None:
        return reading
    write_file(request.out, reading.to_yaml().encode(), "--out")
    return replace(reading, written=request.out)


def read_text(text: str, source: str, stated: ClusterFile, where: str) -> MachinesReading:
    """The cluster of one text that is at hand, of a known kind; what is ``stated`` wins over it.

    Raises InputError for a text that cannot be read; that it does not suffice is in the reading's ``problem``."""
    return _reading(read_machines(text, source=source, where=where), stated)


def _inventories(texts: tuple[tuple[str, str | None], ...]) -> list[Inventory]:
    if not 0 < len(texts) <= MAX_TEXTS:
        raise InputError(
            "no text is given", where="FILE", allowed=f"1 to {MAX_TEXTS} files", hint="- is standard input"
        )
    if sum(name == STDIN for name, _ in texts) > 1:
        raise InputError("standard input can be read once only", where="FILE", got="- twice", hint="save one as a file")
    return [_inventory(name, source) for name, source in texts]


def _inventory(name: str, source: str | None) -> Inventory:
    if name == ENVIRONMENT and source == "slurm":
        return from_environment(os.environ, "environment")
    where = "standard input" if name == STDIN else name
    text = decode(_bytes(name), where)
    try:
        return read_machines(text, source=source, where=where)
    except InputError as problem:
        other = next((kind for kind in SOURCES.values() if kind.name != source and kind.recognises(text)), None)
        if source is None or other is None:
            raise
        raise InputError(
            problem.message,
            where=problem.where,
            got=problem.got,
            allowed=problem.allowed,
            hint=f"this looks like {other.title}: `planner cluster read` takes every kind",
        ) from problem


def _bytes(name: str) -> bytes:
    """At most one byte more than a text may have."""
    if name == STDIN:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError(
                "no text is given",
                where="FILE",
                allowed="a file, or text on standard input",
                hint="for example: nvidia-smi topo -m | planner cluster from-topo - --gpu h100",
            )
        return sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    path = Path(name)
    try:
        if not path.exists():
            raise InputError(
                "there is no such file", where="FILE", got=shown(name), allowed="a file, or -", hint="check the path"
            )
        with path.open("rb") as stream:
            return stream.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as problem:
        raise unreadable(problem, "FILE", name) from problem


def _reading(inventory: Inventory, options: ClusterFile) -> MachinesReading:
    facts = Facts()
    cluster: ClusterFile | None = None
    assumptions: tuple[Assumption, ...] = ()
    problem: InputError | None = None
    try:
        fill(facts, inventory, options)
        cluster = facts.file()
        assumptions = resolve_file(cluster).assumptions
    except InputError as found:
        problem, cluster = found, None
    return MachinesReading(
        inventory=inventory,
        cluster=cluster,
        origins=facts.origins if cluster is not None else {},
        as_reference=tuple(facts.as_reference) if cluster is not None else (),
        assumptions=assumptions,
        findings=tuple(dict.fromkeys([*inventory.findings, *facts.findings])),
        problem=problem,
    )
