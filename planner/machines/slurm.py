"""Reads what Slurm says: nodes, the variables of a running job, or a plain host list.

A job's variables describe what was allocated, and so win over what its nodes could give."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from planner.errors import InputError
from planner.machines import slurm_nodes
from planner.machines.hostlist import expand
from planner.machines.inventory import Inventory, Node
from planner.machines.slurm_nodes import LEAST_MEMORY_MIB, about_holes, about_odd, gpus_by_type
from planner.machines.text import clean, note, warning, whole
from planner.specs.finding import Finding
from planner.specs.problems import shown
from planner.units import counted

JOB_TITLE = "variables of a Slurm job"
LIST_TITLE = "Slurm host list"
HINT = "give the output of `scontrol show node`, of `sinfo`, of `env | grep SLURM` inside a job, or a host list"

_ASSIGNED = re.compile(r"^\s*(?:export\s+|declare\s+-x\s+|setenv\s+)?(SLURM[A-Z0-9_]*)(?:=|\s)\s*(.*)$")
_LIST = re.compile(r"[A-Za-z][\w.-]*\[[0-9][0-9,-]*\][\w.,\[\]-]*", re.ASCII)
_HOSTS = re.compile(r"[A-Za-z][\w.,\[\]-]*", re.ASCII)
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x[0-9]{1,6}\))?")
"""Of ``SLURM_TASKS_PER_NODE``, where every node has the same number."""


def recognises(text: str) -> bool:
    """Whether a node, a variable of Slurm or nothing but a host list with a bracket is there."""
    plain = clean(text)
    lines = plain.split()
    if any(_LIST.fullmatch(line) for line in lines) and all(_HOSTS.fullmatch(line) for line in lines):
        return True
    if slurm_nodes.has_nodes(plain) or slurm_nodes.has_table(plain) or slurm_nodes.has_json(plain):
        return True
    return any(_ASSIGNED.match(line) for line in plain.splitlines())


def read(text: str, where: str = "Slurm") -> Inventory:
    """Nodes and GPUs; InputError where the text is neither nodes, variables nor a host list."""
    plain = clean(text)
    if slurm_nodes.has_nodes(plain):
        return slurm_nodes.read_nodes(plain, where)
    if slurm_nodes.has_json(plain):
        return slurm_nodes.read_json(plain, where)
    if slurm_nodes.has_table(plain):
        return slurm_nodes.read_table(plain, where)
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
    findings = [*about_holes(names)]
    if len(names) < len(hosts):
        findings.append(
            warning("host-repeated", f"named twice, counted once: {counted(len(hosts) - len(names), 'host')}")
        )
    return Inventory(source=LIST_TITLE, nodes=tuple(Node(name=name) for name in names), findings=tuple(findings))


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
    findings = [*about_holes(names), *_about_job(job, len(names) or stated, names)]
    if names and stated is not None and stated != len(names):
        findings.append(
            warning(
                "node-count-differs", f"the list names {counted(len(names), 'node')}, SLURM_JOB_NUM_NODES says {stated}"
            )
        )
    product, per_node, more = _gpus(job, len(names) or stated)
    memory = _memory(job, per_node)
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
        host_memory_mib=memory,
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
    asked = _by_task(job, nodes)
    if asked is not None and not any(counts.values()):
        product, counts = product or asked[0], {"GPUs of a task x tasks of a node": asked[1]}
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


def _by_task(job: Mapping[str, str], nodes: int | None) -> tuple[str | None, int] | None:
    """(GPU, count on a node) where GPUs were asked for by task."""
    kind, count = _typed(job.get("SLURM_GPUS_PER_TASK", ""))
    for name, number in gpus_by_type(job.get("SLURM_TRES_PER_TASK", "")).items():
        kind, count = kind or name or None, count or number
    spread = _TASKS.fullmatch(job.get("SLURM_TASKS_PER_NODE", ""))
    tasks = whole(job.get("SLURM_NTASKS_PER_NODE")) or (whole(spread[1]) if spread else None)
    total = whole(job.get("SLURM_NTASKS"))
    if tasks is None and total and nodes and total % nodes == 0:
        tasks = total // nodes
    return None if not count or not tasks else (kind, count * tasks)


def _memory(job: Mapping[str, str], gpus: int | None) -> int | None:
    """MiB of host memory that the job has on a node, however it was asked for."""
    cores = whole(job.get("SLURM_CPUS_ON_NODE")) or 0
    for name, times in (("SLURM_MEM_PER_NODE", 1), ("SLURM_MEM_PER_GPU", gpus or 0), ("SLURM_MEM_PER_CPU", cores)):
        memory = (whole(job.get(name), 10**9) or 0) * times
        if memory >= LEAST_MEMORY_MIB:
            return memory
    return None


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
        findings.append(about_odd(nodes))
    return findings
