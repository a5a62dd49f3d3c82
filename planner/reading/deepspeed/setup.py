"""What lies beside ds_config.json: degrees written as constants in Python, and the GPUs of hostfile or start script.

Python is looked at as a syntax tree and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.reading.configuration import Files
from planner.reading.texts.python_module import parse_python
from planner.specs.finding import Finding

CONSTANTS = (
    "PIPELINE_STAGES",
    "DATA_PARALLEL",
    "TENSOR_RANKS",
    "SEQUENCE_RANKS",
    "SEQ_LEN",
    "MICRO_BATCH",
    "ATTENTION",
    "RECOMPUTE",
)
"""Names that a rendered parallel_setup.py gives to what JSON has no key for."""

_SLOTS = re.compile(r"^(\S+)\s+slots=([0-9]{1,6})\s*(?:#.*)?$")
_NODES = re.compile(r"--nnodes[=\s]+([0-9]{1,6})\b")
_PER_NODE = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]gpus)[=\s]+([0-9]{1,6})\b")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Constants of a Python file beside the configuration."""

    values: Mapping[str, int | str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    """The file; empty where there is none."""
    unread: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def number(self, name: str) -> int | None:
        value = self.values.get(name)
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) else None


@dataclass(frozen=True, kw_only=True)
class Machines:
    """GPUs as hostfile or start script count them."""

    gpus: int | None = None
    gpus_per_node: int | None = None
    findings: tuple[Finding, ...] = ()


def read_setup(files: Files) -> Setup:
    """The constants of the first Python file that has any; InputError where a file that names them is no Python."""
    for name, text in sorted(files.items()):
        if name.endswith(".py") and any(re.search(rf"^{constant}\s*[:=]", text, re.M) for constant in CONSTANTS):
            return _constants(name, text)
    return Setup()


def _constants(name: str, text: str) -> Setup:
    tree = parse_python(name, text)
    values: dict[str, int | str] = {}
    lines: dict[str, int] = {}
    unread: list[str] = []
    findings: list[Finding] = []
    for target, value in _assignments(tree):
        where = f"{name}:{value.lineno}"
        if not isinstance(value, ast.Constant) or isinstance(value.value, bool):
            unread.append(f"{where}: {target} is computed")
        elif target in ("ATTENTION", "RECOMPUTE"):
            if isinstance(value.value, str):
                values[target], lines[target] = value.value, value.lineno
            else:
                findings.append(_not_a(where, target, "a text"))
        elif isinstance(value.value, int) and 0 < value.value <= 10**9:
            values[target], lines[target] = value.value, value.lineno
        else:
            findings.append(_not_a(where, target, "a whole number above 0"))
    return Setup(values=values, lines=lines, name=name, unread=tuple(unread), findings=tuple(findings))


def _assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """Module-level ``NAME = value`` of the known names, the last one of each."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and target.id in CONSTANTS and isinstance(value, ast.expr):
                found[target.id] = value
    return list(found.items())


def _not_a(where: str, name: str, wanted: str) -> Finding:
    return Finding(id="wrong-type", severity="error", message=f"{name} is not {wanted}", where=where, allowed=wanted)


def read_machines(files: Files) -> Machines:
    """GPUs of all nodes, and of one where all are alike; a hostfile counts before a start script."""
    for name, text in sorted(files.items()):
        if name.endswith(("hostfile", "hostfile.txt")):
            return _hostfile(name, text)
    for name, text in sorted(files.items()):
        if name.endswith((".sh", ".sbatch")):
            per_node = _PER_NODE.search(text)
            if per_node and ("torchrun" in text or "deepspeed" in text):
                nodes = _NODES.search(text)
                count = int(per_node.group(1))
                total = count * int(nodes.group(1)) if nodes else count
                if total > 0:
                    return Machines(gpus=total, gpus_per_node=count)
    return Machines()


def _hostfile(name: str, text: str) -> Machines:
    """``host slots=N`` a line (deepspeed/launcher/runner.py, fetch_hostfile)."""
    slots: dict[str, int] = {}
    findings: list[Finding] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _SLOTS.match(stripped)
        if match is None:
            findings.append(_bad_host(f"{name}:{number}", "this line is no host with its slots"))
        elif match.group(1) in slots:
            findings.append(_bad_host(f"{name}:{number}", f"the host {match.group(1)[:60]} is listed twice"))
        else:
            slots[match.group(1)] = int(match.group(2))
    counts = set(slots.values())
    if len(counts) > 1:
        findings.append(
            Finding(
                id="uneven-slots",
                severity="warning",
                message=f"the nodes offer different numbers of GPUs: {', '.join(map(str, sorted(counts)[:8]))}",
                where=name,
                hint="a plan expects the same number on every node",
            )
        )
    return Machines(
        gpus=sum(slots.values()) or None,
        gpus_per_node=(counts.pop() or None) if len(counts) == 1 else None,
        findings=tuple(findings),
    )


def _bad_host(where: str, message: str) -> Finding:
    return Finding(
        id="hostfile",
        severity="error",
        message=f"{message}; the deepspeed launcher refuses the file",
        where=where,
        allowed="one line a node: worker-0 slots=8",
    )
