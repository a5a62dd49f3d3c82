"""Reads what Slurm says: ``scontrol show node``, the variables of a running job, or a plain host list.

A job's variables describe what was allocated; nodes describe what could be, so drained and failed ones are left out."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping

from planner.errors import InputError
from planner.machines.hostlist import expand, holes
from planner.machines.inventory import Inventory, Node
from planner.machines.text import clean, listed, note, warning, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown

NODES_TITLE = "scontrol show node"
JOB_TITLE = "variables of a Slurm job"
LIST_TITLE = "Slurm host list"
HINT = "give the output of `scontrol show node`, of `env | grep SLURM` inside a job, or a host list"

_ASSIGNED = re.compile(r"^\s*(?:export\s+|declare\s+-x\s+|setenv\s+)?(SLURM[A-Z0-9_]*)(?:=|\s)\s*(.*)$")
_PAIR = re.compile(r"(?<![\w/])([A-Za-z][\w/:]*)=([^\s]*)")
_GRES = re.compile(r"^(?:gres/)?gpu(?:[:/]([A-Za-z0-9_.\-]+?))?[:=]([0-9]{1,6})$")
_SHARES = re.compile(r"[0-9]g\.[0-9]+gb", re.IGNORECASE)
"""A MIG profile as the type of a generic resource."""
_LIST = re.compile(r"[A-Za-z][\w.-]*\[[0-9][0-9,-]*\][\w.,\[\]-]*", re.ASCII)
_PARENTHESES = re.compile(r"\([^()]*\)")
# fmt: off
_UNUSABLE = frozenset((
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FAILED", "ERROR", "UNKNOWN", "FUTURE", "MAINT",
    "INVAL", "NOT_RESPONDING", "NO_RESPOND", "INVALID_REG", "REBOOT_ISSUED", "REBOOT_REQUESTED",
))
# fmt: on
"""States and flags of node_state in Slurm's own list (scontrol(1)) under which no new job starts."""
_LEAST_MEMORY_MIB = 1024
"""RealMemory=1 is what slurm.conf has when nobody set it."""


def recognises(text: str) -> bool:
    """Whether a node, a variable of Slurm or nothing but a host list with a bracket is there."""
    plain = clean(text)
    if _LIST.fullmatch(plain.strip()):
        return True
    return re.search(r"^\s*NodeName=", plain, re.MULTILINE) is not None or any(
        _ASSIGNED.match(line) for line in plain.splitlines()
    )


def read(text: str, where: str = "Slurm") -> Inventory:
    """Nodes and GPUs; InputError where the text is neither nodes, variables nor a host list."""
    plain = clean(text)
    if re.search(r"^\s*NodeName=", plain, re.MULTILINE):
        return _from_nodes(plain, where)
    variables = {}
    for line in plain.splitlines():
        match = _ASSIGNED.match(line)
        if match is not None:
            variables[match[1]] = _unquoted(match[2])
    if variables:
        return from_environment(variables, where)
    return _from_list(plain, where)


def _unquoted(value: str) -> str:
    """A value as the shell would see it; as it stands where quotes do not match."""
    try:
        words = shlex.split(value, comments=False)
    except ValueError:
        return value.strip()
    return " ".join(words)


def _from_list(text: str, where: str) -> Inventory:
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    hosts = tuple(host for line in lines if line for host in expand(line, where))
    if not hosts:
        raise InputError("no host is named", where=where, got=shown(text.strip()), hint=HINT)
    names = tuple(dict.fromkeys(hosts))
    findings = [*_about_count(names)]
    if len(names) < len(hosts):
        findings.append(warning("host-repeated", f"{len(hosts) - len(names)} hosts are named twice and count once"))
    return Inventory(source=LIST_TITLE, nodes=tuple(Node(name=name) for name in names), findings=tuple(findings))


def _about_count(names: tuple[str, ...]) -> list[Finding]:
    missing = holes(names)
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


# -- variables of a job ------------------------------------------------------------------------------------------------


def from_environment(variables: Mapping[str, str], where: str = JOB_TITLE) -> Inventory:
    """The allocation that the variables of a job describe (``SLURM_*``; see sbatch(1), OUTPUT ENVIRONMENT)."""
    job = {name: clean(value).strip() for name, value in variables.items() if name.startswith("SLURM")}
    if not job:
        raise InputError(
            "no variable of Slurm is set",
            where=where,
            hint="run it inside a job, or give a file or -",
        )
    if job.get("SLURM_HET_SIZE", "1") not in ("", "1"):
        raise InputError(
            "the job has several components with machines of their own",
            where="SLURM_HET_SIZE",
            got=shown(job["SLURM_HET_SIZE"]),
            hint="plan for one component: give its variables (SLURM_..._HET_GROUP_0) without the suffix",
        )
    names = _hosts(job, where)
    stated = whole(job.get("SLURM_JOB_NUM_NODES") or job.get("SLURM_NNODES"))
    findings = [*_about_count(names), *_about_job(job, len(names) or stated, names)]
    if names and stated is not None and stated != len(names):
        findings.append(
            warning("node-count-differs", f"the list names {len(names)} nodes, SLURM_JOB_NUM_NODES says {stated}")
        )
    product, per_node, more = _gpus(job, len(names) or stated)
    memory = whole(job.get("SLURM_MEM_PER_NODE"), 10**9)
    if not names and stated is None and per_node is None:
        raise InputError(
            "neither nodes nor GPUs are given",
            where=where,
            got=", ".join(sorted(job))[:70],
            allowed="SLURM_JOB_NODELIST and SLURM_GPUS_PER_NODE, or SLURM_GPUS_ON_NODE",
            hint=HINT,
        )
    return Inventory(
        source=JOB_TITLE,
        nodes=tuple(Node(name=name, gpus=per_node) for name in names),
        node_count=stated if not names else None,
        gpus_per_node=per_node,
        product=product,
        host_memory_mib=memory if memory and memory >= _LEAST_MEMORY_MIB else None,
        levels=_levels(job),
        findings=(*findings, *more),
        unread=tuple(name for name in ("SLURM_GPU_FREQ", "SLURM_CPU_BIND") if job.get(name)),
    )


def _hosts(job: Mapping[str, str], where: str) -> tuple[str, ...]:
    text = job.get("SLURM_JOB_NODELIST") or job.get("SLURM_NODELIST") or ""
    return tuple(dict.fromkeys(expand(text, f"{where}: SLURM_JOB_NODELIST"))) if text else ()


def _gpus(job: Mapping[str, str], nodes: int | None) -> tuple[str | None, int | None, list[Finding]]:
    """(GPU, count on a node, findings); variables that disagree are told."""
    product: str | None = None
    counts: dict[str, int] = {}
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS"):
        kind, count = _typed(job.get(name, ""))
        product = product or kind
        if count is not None:
            counts[name] = count
    listed_gpus = [part for part in job.get("SLURM_JOB_GPUS", "").split(",") if part.strip()]
    if listed_gpus:
        counts["SLURM_JOB_GPUS"] = len(expand("g[" + ",".join(listed_gpus) + "]")) if _ids(listed_gpus) else 0
    total = counts.pop("SLURM_GPUS", None)
    if total is not None and nodes and total % nodes == 0:
        counts.setdefault("SLURM_GPUS", total // nodes)
    counts = {name: count for name, count in counts.items() if count}
    findings = []
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        findings.append(warning("gpu-count-differs", f"GPUs of a node differ: {told}; the first is taken"))
    if total is not None and nodes and total % nodes:
        findings.append(
            warning(
                "gpus-uneven", f"SLURM_GPUS={total} does not divide among {nodes} nodes", hint="use --gpus-per-node"
            )
        )
    return product, next(iter(counts.values()), None), findings


def _ids(parts: list[str]) -> bool:
    return all(re.fullmatch(r"\s*[0-9]{1,4}(-[0-9]{1,4})?\s*", part) for part in parts)


def _typed(value: str) -> tuple[str | None, int | None]:
    """``h100:8``, ``gpu:h100:8`` or ``8`` as (type, count)."""
    first = value.split(",")[0].removeprefix("gres:").removeprefix("gpu:")
    kind, colon, count = first.rpartition(":")
    return (kind or None) if colon else None, whole(count if colon else first)


def _levels(job: Mapping[str, str]) -> tuple[str, ...]:
    pattern = job.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    return tuple(level for level in pattern.split(".") if level and level != "node")[:8]


def _about_job(job: Mapping[str, str], nodes: int | None, names: tuple[str, ...]) -> list[Finding]:
    findings = []
    on_node, per_task = whole(job.get("SLURM_CPUS_ON_NODE")), whole(job.get("SLURM_CPUS_PER_TASK"))
    tasks = whole(job.get("SLURM_NTASKS_PER_NODE")) or 1
    if on_node is not None and per_task is not None and on_node < per_task * tasks:
        findings.append(
            warning(
                "cpus-contradict",
                f"SLURM_CPUS_ON_NODE={on_node} contradicts SLURM_CPUS_PER_TASK={per_task}"
                + (f" with {tasks} tasks a node" if tasks > 1 else ""),
                hint="srun does not inherit --cpus-per-task since Slurm 22.05: pass it, or set SRUN_CPUS_PER_TASK",
            )
        )
    if "SLURM_LAUNCH_NODE_IPADDR" in job:
        first = names[0] if names else "the first host of SLURM_JOB_NODELIST"
        findings.append(
            note(
                "launch-node",
                "SLURM_LAUNCH_NODE_IPADDR is the host where srun was started (the submit host under salloc), which "
                "need not be a node of the job",
                where="SLURM_LAUNCH_NODE_IPADDR",
                hint=f"the rendezvous address is {first}",
            )
        )
    if nodes is not None and nodes > 2 and nodes % 2:
        findings.append(_odd(nodes))
    return findings


def _odd(nodes: int) -> Finding:
    fitting = [degree for degree in range(2, nodes + 1) if nodes % degree == 0]
    return note(
        "nodes-odd",
        f"{nodes} nodes: with tensor parallelism inside a node, pipelines over 2 nodes leave one idle; "
        f"pipeline degrees that use all: 1, {', '.join(map(str, fitting[:6]))}",
        hint=f"or plan for {nodes - 1} nodes: --nodes {nodes - 1}",
    )


# -- nodes ---------------------------------------------------------------------------------------------------------


def _from_nodes(text: str, where: str) -> Inventory:
    """Blocks of ``scontrol show node``; CPU-only nodes are left out."""
    blocks = re.split(r"^\s*(?=NodeName=)", text, flags=re.MULTILINE)
    nodes: list[Node] = []
    findings: list[Finding] = []
    without = []
    for block in blocks:
        facts = dict(_PAIR.findall(block))
        name = facts.get("NodeName", "")
        if not name:
            continue
        node, about = _node(name, facts, block)
        if node is None:
            without.append(name)
            continue
        nodes.append(node)
        findings += about
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
            note("node-without-gpus", f"{len(without)} nodes without GPUs are left out", where=listed(without))
        )
    findings += _about_count(tuple(node.name for node in nodes))
    usable = sum(node.usable for node in nodes)
    if usable > 2 and usable % 2:
        findings.append(_odd(usable))
    return Inventory(source=NODES_TITLE, nodes=tuple(nodes), findings=tuple(findings))


def _resources(value: str) -> Counter[str]:
    """Whole GPUs by type in ``gpu:h100:8(S:0-1),shard:...`` or ``cpu=2,gres/gpu=8``; MIG profiles under ``mig``."""
    counts: Counter[str] = Counter()
    for item in _PARENTHESES.sub("", value).split(","):
        match = _GRES.match(item.strip())
        if match is not None:
            kind = match[1] or ""
            counts["mig" if _SHARES.search(kind) else kind] += int(match[2])
    return counts


def _node(name: str, facts: Mapping[str, str], block: str) -> tuple[Node | None, list[Finding]]:
    gres = _resources(facts.get("Gres", "")) or _resources(facts.get("CfgTRES", ""))
    mig = gres.pop("mig", 0)
    gpus = sum(gres.values())
    if not gpus:
        return None, []
    held = _resources(facts.get("AllocTRES", ""))
    # gres/gpu counts every type, gres/gpu:h100 repeats it for one.
    busy = min(gpus, held.get("", 0) or _used(facts) or sum(held.values()))
    usable, findings = _state(name, facts.get("State", ""), block)
    if busy and usable:
        findings.append(
            note(
                "gpus-allocated", f"{busy} of {gpus} GPUs of {name} are allocated now", where=name, hint="the job waits"
            )
        )
    if mig:
        findings.append(warning("mig-enabled", f"{name} has {mig} MIG instances, which are not counted", where=name))
    kinds = [kind for kind in gres if kind]
    if len(kinds) > 1:
        findings.append(warning("gpus-mixed", f"{name} has several kinds of GPU: {', '.join(kinds)}", where=name))
    memory = whole(facts.get("RealMemory"), 10**9)
    if memory is not None and memory < _LEAST_MEMORY_MIB:
        findings.append(
            note("memory-not-set", f"RealMemory={memory} MiB of {name} is a default, not its memory", where=name)
        )
        memory = None
    sockets, per_socket = whole(facts.get("Sockets"), 1024), whole(facts.get("CoresPerSocket"), 4096)
    node = Node(
        name=name,
        gpus=gpus,
        busy_gpus=busy,
        product=kinds[0] if len(kinds) == 1 else None,
        host_memory_mib=memory,
        cores=sockets * per_socket if sockets and per_socket else None,
        usable=usable,
    )
    return node, findings


def _used(facts: Mapping[str, str]) -> int:
    """``GresUsed`` of ``scontrol show node -d``."""
    return sum(_resources(facts.get("GresUsed", "")).values())


def _state(name: str, state: str, block: str) -> tuple[bool, list[Finding]]:
    """Whether jobs start on a node in this state (MIXED+DRAIN, IDLE*, DOWN~)."""
    flags = set(re.split(r"[+\s]", state.rstrip("*~#!%$@^-").upper()))
    bad = sorted(flags & _UNUSABLE) + (["not responding"] if "*" in state else [])
    if not bad:
        return True, []
    reason = re.search(r"\bReason=(.*?)(?:\s*\[[^\]]*\])?\s*$", block, re.MULTILINE)
    because = f" ({shown(reason[1])[1:-1]})" if reason and reason[1] else ""
    return False, [
        warning(
            "node-unusable",
            f"{name} is {state}: no job starts there{because}, so it is not counted",
            where=name,
            hint=f"when it is repaired: scontrol update nodename={name} state=resume",
        )
    ]
