"""Reads the nodes that Slurm lists, with ``scontrol show node`` (also --json) or ``sinfo``: GPUs, host, states.

Nodes describe what jobs could be given, so drained, failed and reserved ones are told apart from the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.errors import InputError
from planner.machines.documents import entries, parse, word
from planner.machines.hostlist import expand, holes
from planner.machines.inventory import Inventory, Node
from planner.machines.text import listed, note, warning, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown
from planner.units import counted

NODES_TITLE = "scontrol show node"
TABLE_TITLE = "sinfo"
TABLE_COMMAND = 'sinfo -N -o "%N %G %m %T"'
LEAST_MEMORY_MIB = 1024
"""RealMemory=1 is what slurm.conf has when nobody set it."""

_NODE = re.compile(r"^\s*(?=NodeName=)", re.MULTILINE)
_PAIR = re.compile(r"(?<![\w/])([A-Za-z][\w/:]*)=([^\s]*)")
_GRES = re.compile(r"^(?:gres/)?gpu(?:[:/]([A-Za-z0-9_.\-]+?))?[:=]([0-9]{1,6})$")
_SHARES = re.compile(r"[0-9]g\.[0-9]+gb", re.IGNORECASE)
"""A MIG profile as the type of a generic resource."""
_PARENTHESES = re.compile(r"\([^()]*\)")
# fmt: off
_UNUSABLE = frozenset((
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FAILED", "ERROR", "UNKNOWN", "FUTURE", "MAINT",
    "MAINTENANCE", "INVAL", "NOT_RESPONDING", "NO_RESPOND", "INVALID_REG", "REBOOT_ISSUED", "REBOOT_REQUESTED",
    "DRNG", "FAILG", "UNK", "FUTR",
))
# fmt: on
"""States and flags of node_state in Slurm's own lists (scontrol(1), sinfo(1)) under which no new job starts."""
_PROMPT = re.compile(r"[$#>](?:\s|$)")
"""A line of the shell under the table."""
_SUFFIXES = "*~#!%$@^-"
_BAD_SUFFIXES = {"*": "not responding", "$": "in a maintenance reservation", "@": "about to reboot", "^": "rebooting"}
_RESERVED = frozenset(("RESERVED", "RESV"))
_HEADS = {
    "NODELIST": "NodeName",
    "HOSTNAMES": "NodeName",
    "NODE_HOST": "NodeName",
    "GRES": "Gres",
    "STATE": "State",
} | {"STATECOMPACT": "State", "MEMORY": "RealMemory", "GRES_USED": "GresUsed", "REASON": "Reason"}
"""Column of ``sinfo`` -> what ``scontrol`` calls it."""


_NAMES = {
    "name": "NodeName",
    "gres": "Gres",
    "gres_used": "GresUsed",
    "tres": "CfgTRES",
    "state": "State",
    "real_memory": "RealMemory",
    "sockets": "Sockets",
    "cores": "CoresPerSocket",
}
"""Name in Slurm's OpenAPI -> what ``scontrol`` calls it."""


def has_nodes(text: str) -> bool:
    """Whether a node of ``scontrol`` is there."""
    return re.search(r"^\s*NodeName=", text, re.MULTILINE) is not None


def has_json(text: str) -> bool:
    """Whether this is what ``scontrol show node --json`` or slurmrestd prints."""
    return text.lstrip().startswith("{") and re.search(r"\"nodes\"\s*:", text) is not None and '"gres"' in text


def has_table(text: str) -> bool:
    """Whether the header of ``sinfo`` is there."""
    return any(_is_header(line.split()) for line in text.splitlines())


def _is_header(words: list[str]) -> bool:
    heads = {_HEADS.get(word) for word in words}
    return "NodeName" in heads and len(words) > 1 and bool(heads & {"Gres", "State"})


def read_nodes(text: str, where: str) -> Inventory:
    """Blocks of ``scontrol show node``; CPU-only nodes are left out."""
    blocks = [(dict(_PAIR.findall(block)), _reason(block)) for block in _NODE.split(text)]
    return _inventory(NODES_TITLE, blocks, where)


def read_json(text: str, where: str) -> Inventory:
    """The same facts under their names in Slurm's OpenAPI; states are a list there."""
    blocks = [
        ({key: _fact(node.get(name)) for name, key in _NAMES.items()}, word(node.get("reason")))
        for document in parse(text, where)
        for node in entries(document.get("nodes"))
    ]
    return _inventory(f"{NODES_TITLE} --json", blocks, where)


def _fact(value: object) -> str:
    return "+".join(map(word, value)) if isinstance(value, list) else word(value)


def read_table(text: str, where: str) -> Inventory:
    """Rows of ``sinfo``, where a node comes once for each of its partitions."""
    head: list[str] = []
    blocks: dict[str, tuple[dict[str, str], str]] = {}
    for line in text.splitlines():
        words = line.split()
        if _is_header(words):
            head = _columns(line, where)
            continue
        if not head or not words or _PROMPT.search(line):
            continue
        cells = line.split(maxsplit=len(head) - 1)
        if len(cells) != len(head):
            raise InputError(
                "this row has not the columns of the header", where=where, got=shown(line), hint=f"run {TABLE_COMMAND}"
            )
        facts = dict(zip(head, cells, strict=True))
        facts["RealMemory"] = facts.get("RealMemory", "").rstrip("+")
        for name in expand(facts["NodeName"], where):
            blocks.setdefault(name, ({**facts, "NodeName": name}, facts.get("Reason", "").removeprefix("none")))
    inventory = _inventory(TABLE_TITLE, blocks.values(), where)
    if "State" in head:
        return inventory
    told = note("states-not-shown", "no column STATE: nodes that are down or drained count", hint=TABLE_COMMAND)
    return replace(inventory, findings=(*inventory.findings, told))


def _columns(line: str, where: str) -> list[str]:
    """What the columns under this header are; InputError without the one that tells GPUs."""
    head = [_HEADS.get(word, word) for word in line.split()]
    if "Gres" not in head:
        raise InputError(
            "the table does not say which nodes have GPUs",
            where=where,
            got=shown(line),
            allowed="a column GRES",
            hint=f"run {TABLE_COMMAND}",
        )
    return head


def _reason(block: str) -> str:
    reason = re.search(r"\bReason=(.*?)(?:\s*\[[^\]]*\])?\s*$", block, re.MULTILINE)
    return reason[1] if reason else ""


def _inventory(source: str, blocks: Iterable[tuple[Mapping[str, str], str]], where: str) -> Inventory:
    nodes: list[Node] = []
    findings: list[Finding] = []
    without: list[str] = []
    for facts, reason in blocks:
        name = facts.get("NodeName", "")
        if not name:
            continue
        node, about = _node(name, facts, reason)
        findings += about
        if node is None:
            without.append(name)
        else:
            nodes.append(node)
    if not nodes:
        raise InputError(
            "no node has whole GPUs",
            where=where,
            got=listed(without) or "no node",
            allowed="nodes with Gres=gpu:...",
            hint="name the nodes of the GPU partition: scontrol show node gpu-[001-016]",
        )
    if without:
        findings.append(
            note(
                "node-without-gpus",
                f"left out: {counted(len(without), 'node')} without whole GPUs",
                where=listed(without),
            )
        )
    findings += about_holes(tuple(node.name for node in nodes), known=without)
    usable = sum(node.usable for node in nodes)
    if usable > 2 and usable % 2:
        findings.append(about_odd(usable))
    return Inventory(source=source, nodes=tuple(nodes), findings=tuple(findings))


def about_holes(names: tuple[str, ...], known: Iterable[str] = ()) -> list[Finding]:
    """What the numbering of the nodes skips, but for those that are known to be something else."""
    missing = [name for name in holes(names) if name not in set(known)]
    if not missing:
        return []
    return [
        warning(
            "node-missing",
            f"the numbering skips {listed(missing)}: {len(names)} nodes",
            where=listed(missing),
            hint="a pipeline or data-parallel degree must divide what is left; ask for the node, or for fewer nodes",
        )
    ]


def about_odd(nodes: int) -> Finding:
    """Which pipeline degrees use all of an odd number of nodes."""
    fitting = [degree for degree in range(2, nodes + 1) if nodes % degree == 0]
    return note(
        "nodes-odd",
        f"{nodes} nodes: with tensor parallelism inside a node, pipelines over 2 nodes leave one idle; "
        f"pipeline degrees that use all: 1, {', '.join(map(str, fitting[:6]))}",
        hint=f"or plan for {nodes - 1} nodes: --nodes {nodes - 1}",
    )


def gpus_by_type(value: str) -> Counter[str]:
    """Whole GPUs by type in ``gpu:h100:8(S:0-1),shard:...`` or ``cpu=2,gres/gpu=8``; MIG profiles under ``mig``."""
    counts: Counter[str] = Counter()
    for item in _PARENTHESES.sub("", value).replace("::", ":").split(","):
        match = _GRES.match(item.strip())
        if match is not None:
            kind = match[1] or ""
            counts["mig" if _SHARES.search(kind) else kind] += int(match[2])
    return counts


def _node(name: str, facts: Mapping[str, str], reason: str) -> tuple[Node | None, list[Finding]]:
    gres = gpus_by_type(facts.get("Gres", "")) or gpus_by_type(facts.get("CfgTRES", ""))
    mig = gres.pop("mig", 0)
    gpus = sum(gres.values())
    findings = []
    if mig:
        findings.append(warning("mig-enabled", f"{name} has {mig} MIG instances, which are not counted", where=name))
    if not gpus:
        return None, findings
    held = gpus_by_type(facts.get("AllocTRES", ""))
    # gres/gpu counts every type, gres/gpu:h100 repeats it for one.
    busy = min(gpus, held.get("", 0) or _used(facts) or sum(held.values()))
    usable, about = _state(name, facts.get("State", ""), reason)
    findings += about
    if busy and usable:
        findings.append(
            note(
                "gpus-allocated", f"{busy} of {gpus} GPUs of {name} are allocated now", where=name, hint="the job waits"
            )
        )
    kinds = [kind for kind in gres if kind]
    if len(kinds) > 1:
        findings.append(
            warning(
                "gpus-mixed",
                f"{name} has several kinds of GPU: {', '.join(kinds)}",
                where=name,
                hint="--gpu plans with the nodes of one kind only",
            )
        )
    memory = whole(facts.get("RealMemory"), 10**9)
    if memory is not None and memory < LEAST_MEMORY_MIB:
        findings.append(
            note("memory-not-set", f"RealMemory={memory} MiB of {name} is a default, not its memory", where=name)
        )
        memory = None
    sockets, per_socket = whole(facts.get("Sockets"), 1024), whole(facts.get("CoresPerSocket"), 4096)
    node = Node(
        name=name,
        gpus=gpus,
        busy_gpus=busy,
        product=" + ".join(kinds) or None,
        host_memory_mib=memory,
        cores=sockets * per_socket if sockets and per_socket else None,
        usable=usable,
    )
    return node, findings


def _used(facts: Mapping[str, str]) -> int:
    """``GresUsed`` of ``scontrol show node -d``."""
    return sum(gpus_by_type(facts.get("GresUsed", "")).values())


def _state(name: str, state: str, reason: str) -> tuple[bool, list[Finding]]:
    """Whether jobs start on a node in this state (MIXED+DRAIN, IDLE*, DOWN~, drng)."""
    flags = {flag.rstrip(_SUFFIXES) for flag in re.split(r"[+\s]", state.upper())}
    bad = sorted(flags & _UNUSABLE) + [word for mark, word in _BAD_SUFFIXES.items() if mark in state]
    if not bad:
        if not flags & _RESERVED:
            return True, []
        return True, [
            note(
                "node-reserved",
                f"{name} is {state}: only jobs of its reservation start there; it is counted",
                where=name,
                hint="scontrol show reservation names who may use it",
            )
        ]
    because = f" ({shown(reason)[1:-1]})" if reason else ""
    return False, [
        warning(
            "node-unusable",
            f"{name} is {state}: no job starts there{because}, so it is not counted",
            where=name,
            hint=f"when it is repaired: scontrol update nodename={name} state=resume",
        )
    ]
