"""Machines read from their own words: the output of drivers, schedulers and launchers, one module a source.

``read_machines`` finds the sources and reads them; they are tried in the order of ``SOURCES``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.errors import InputError
from planner.machines import hostfile, ibstat, kubernetes, kueue, ray, rocm, skypilot, slurm, smi, topo
from planner.machines.combine import combine, compute_nics, domain_of, size_of
from planner.machines.inventory import Device, Inventory, Links, Nic, Node
from planner.machines.products import Match, identify
from planner.specs.problems import shown

__all__ = [
    "SOURCES",
    "Device",
    "Inventory",
    "Links",
    "Match",
    "Nic",
    "Node",
    "Source",
    "combine",
    "compute_nics",
    "domain_of",
    "identify",
    "read_machines",
    "size_of",
]


@dataclass(frozen=True)
class Source:
    """One kind of text."""

    name: str
    """Stable: ``topo``, ``smi`` ..."""
    title: str
    recognises: Callable[[str], bool]
    read: Callable[[str, str], Inventory]


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("topo", "nvidia-smi topo -m", topo.recognises, topo.read),
        Source("rocm", "rocm-smi --showtopo", rocm.recognises, rocm.read),
        Source("smi", "nvidia-smi, with --query-gpu=... --format=csv, -q or -L", smi.recognises, smi.read),
        Source("ibstat", "ibstat", ibstat.recognises, ibstat.read),
        Source("slurm", "scontrol show node, sinfo, or SLURM_* variables", slurm.recognises, slurm.read),
        Source("kubernetes", "kubectl get nodes -o json", kubernetes.recognises, kubernetes.read),
        Source("kueue", "Kueue Topology and ResourceFlavor", kueue.recognises, kueue.read),
        Source("skypilot", "SkyPilot task", skypilot.recognises, skypilot.read),
        Source("ray", "ray.cluster_resources()", ray.recognises, ray.read),
        Source("hostfile", "hostfile", hostfile.recognises, hostfile.read),
    )
}
"""Every source, those with certain marks first."""


_TOGETHER = frozenset(("topo", "rocm", "smi", "ibstat", "slurm"))
"""What people and scripts write into one file, the output of one command after the other."""


def _read_all(sources: Sequence[Source], text: str, where: str) -> Inventory:
    """All that a text holds; a part that cannot be read is told where another can."""
    parts: list[Inventory] = []
    problems: list[tuple[Source, InputError]] = []
    for source in sources:
        try:
            parts.append(source.read(text, where))
        except InputError as problem:
            problems.append((source, problem))
    if not parts:
        raise problems[0][1]
    told = tuple(f"{source.title} ({problem.message})" for source, problem in problems)
    whole = combine(parts)
    return replace(whole, unread=(*whole.unread, *told)) if told else whole


def read_machines(text: str, *, source: str | None = None, where: str = "text") -> Inventory:
    """What ``text`` says about machines; ``source`` names its kind where it is known."""
    if source is not None:
        return SOURCES[source].read(text, where)
    found = [candidate for candidate in SOURCES.values() if candidate.recognises(text)]
    if found:
        together = [candidate for candidate in found if candidate.name in _TOGETHER]
        return _read_all(together or found[:1], text, where)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    raise InputError(
        "this is no description of machines that can be read",
        where=where,
        got=shown(first) if first else "nothing",
        allowed="; ".join(candidate.title for candidate in SOURCES.values()),
        hint="paste the whole output of one of these, or name its kind: planner cluster from-slurm, from-hostfile ...",
    )
