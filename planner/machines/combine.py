"""Joins what several texts say about the same machines: the topology of one node, its GPUs, its cards, and the nodes of
the job.

Each text is read by itself; where two disagree, what a job was given wins over what is built in, and it is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.machines.inventory import Device, Inventory, Nic, Node
from planner.machines.text import listed, note, warning
from planner.specs.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many nodes with how many whole GPUs each."""

    nodes: int | None
    gpus_per_node: int | None
    members: tuple[Node, ...] = ()
    """The nodes that count, where they are known by name."""
    findings: tuple[Finding, ...] = ()


def combine(parts: Sequence[Inventory]) -> Inventory:
    """One inventory of all; of repeated facts the first that is stated stays."""
    if len(parts) == 1:
        return parts[0]
    devices, findings = _devices(parts)
    nics, about = _nics(parts)
    findings += about
    return Inventory(
        source=" + ".join(part.source for part in parts),
        devices=devices,
        machines=next((part.machines for part in parts if part.machines), None),
        links=next((part.links for part in parts if part.links), None),
        nics=nics,
        nodes=next((part.nodes for part in parts if part.nodes), ()),
        node_count=next((part.node_count for part in parts if part.node_count), None),
        gpus_per_node=next((part.gpus_per_node for part in parts if part.gpus_per_node), None),
        product=next((part.product for part in parts if part.product), None),
        alternatives=next((part.alternatives for part in parts if part.alternatives), ()),
        host_memory_mib=next((part.host_memory_mib for part in parts if part.host_memory_mib), None),
        host_cores=next((part.host_cores for part in parts if part.host_cores), None),
        levels=next((part.levels for part in parts if part.levels), ()),
        findings=tuple(dict.fromkeys([*(f for part in parts for f in part.findings), *findings])),
        unread=tuple(
            dict.fromkeys(
                u
                for part in parts
                for u in part.unread
                if not (u.startswith("name of") and devices[:1] and devices[0].name)
            )
        ),
    )


def _devices(parts: Sequence[Inventory]) -> tuple[tuple[Device, ...], list[Finding]]:
    """GPUs by index with every fact that any text states."""
    merged: dict[int, Device] = {}
    counts = [len(part.devices) for part in parts if part.devices]
    for device in (device for part in parts for device in part.devices):
        known = merged.get(device.index)
        merged[device.index] = device if known is None else _both(known, device)
    findings = []
    if len(set(counts)) > 1:
        findings.append(
            warning("gpu-count-differs", f"the texts list {' and '.join(map(str, counts))} GPUs of a machine")
        )
    return tuple(merged[index] for index in sorted(merged)), findings


def _both(first: Device, second: Device) -> Device:
    stated = {
        name: value
        for name, value in vars(second).items()
        if value is not None and getattr(first, name) in (None, False)
    }
    return replace(first, **stated)


def _nics(parts: Sequence[Inventory]) -> tuple[tuple[Nic, ...], list[Finding]]:
    """Ports of the topology with the rates of the list of cards, matched by name; otherwise whichever there is."""
    placed = [nic for part in parts if part.links for nic in part.nics]
    rated = {nic.name: nic for part in parts if not part.links for nic in part.nics}
    if not placed:
        return tuple(rated.values()), []
    if rated and not any(nic.name in rated for nic in placed):
        return _unmatched(tuple(placed), tuple(rated.values()))
    matched = tuple(
        replace(nic, gbps=rated[nic.name].gbps, layer=rated[nic.name].layer, active=rated[nic.name].active)
        if nic.name in rated
        else nic
        for nic in placed
    )
    return matched, []


def _unmatched(placed: tuple[Nic, ...], rated: tuple[Nic, ...]) -> tuple[tuple[Nic, ...], list[Finding]]:
    """Cards of a matrix without its legend: those near a GPU at the rate of the list, unless it has fewer such."""
    fast = compute_nics(rated)
    near = [nic for nic in placed if nic.near]
    enough = near and len(near) <= len(fast)
    chosen = tuple(replace(nic, gbps=fast[0].gbps) for nic in placed) if enough else rated
    told = note(
        "nic-names-differ",
        f"the matrix calls cards {placed[0].name} ..., the list {rated[0].name} ...: which is which is not said, so "
        + ("those near a GPU are taken to have the list's highest rate" if enough else "the list alone counts"),
        hint="the NIC legend under the matrix names them",
    )
    return chosen, [told]


def compute_nics(nics: Sequence[Nic]) -> tuple[Nic, ...]:
    """Ports that carry the job: up, near a GPU where any is, and of the fastest rate among those."""
    up = [nic for nic in nics if nic.active is not False]
    near = [nic for nic in up if nic.near]
    candidates = near or up
    fastest = max((nic.gbps for nic in candidates if nic.gbps is not None), default=None)
    return tuple(nic for nic in candidates if fastest is None or nic.gbps in (None, fastest))


def size_of(inventory: Inventory, wanted: int | None = None) -> Size:
    """Nodes and GPUs of each: the uniform part with the most GPUs where nodes differ, or ``wanted`` GPUs a node."""
    whole = [device for device in inventory.devices if device.whole]
    built = len(whole) if inventory.devices else None
    members = [node for node in inventory.nodes if node.usable]
    if inventory.nodes and any(_given(node) is not None for node in inventory.nodes):
        return _uniform(members, built, wanted)
    findings: list[Finding] = []
    per_node = wanted or inventory.gpus_per_node
    if per_node is None:
        per_node = built
    elif built is not None and built != per_node and wanted is None:
        findings.append(_differs(built, per_node))
    nodes = len(members) if inventory.nodes else inventory.node_count or inventory.machines
    return Size(nodes=nodes, gpus_per_node=per_node, members=tuple(members), findings=tuple(findings))


def _given(node: Node) -> int | None:
    return node.gpus if node.usable_gpus is None else node.usable_gpus


def _differs(built: int, given: int) -> Finding:
    return warning(
        "gpu-count-differs",
        f"the machine lists {built} whole GPUs, the scheduler gives {given} a node: {given} are planned",
    )


def _uniform(members: Sequence[Node], built: int | None, wanted: int | None) -> Size:
    """The number of GPUs a node that uses the most of them, the larger of equals."""
    counts = Counter(_given(node) or 0 for node in members)
    sizes = sorted((size for size in counts if size), reverse=True)
    if not sizes:
        return Size(nodes=0, gpus_per_node=0)
    fitting = {size: sum(times for other, times in counts.items() if other >= size) for size in sizes}
    best = wanted or max(sizes, key=lambda size: (size * fitting[size], size))
    chosen = tuple(node for node in members if (_given(node) or 0) >= best)
    findings = []
    if len(sizes) > 1 or counts.get(0):
        left = [node.name for node in members if (_given(node) or 0) < best]
        total = sum(size * times for size, times in counts.items())
        other = [f"{fitting[size]} x {size}" for size in sizes if size != best]
        findings.append(
            warning(
                "nodes-uneven",
                f"{total} GPUs on {len(members)} nodes are not the same number on each: "
                f"{len(chosen)} nodes x {best} GPUs = {len(chosen) * best} are planned"
                + (f", without {listed(left)}" if left else ", the others of larger nodes stay idle"),
                hint=f"instead: {' or '.join(other)} (--gpus-per-node)" if other else "",
            )
        )
    if built is not None and built != best and wanted is None:
        findings.append(_differs(built, best))
    return Size(nodes=len(chosen), gpus_per_node=best, members=chosen, findings=tuple(findings))


def domain_of(members: Sequence[Node], gpus_per_node: int) -> tuple[int | None, Finding | None]:
    """GPUs of an NVLink domain that spans nodes, from the domain's name on each; the smallest counts."""
    named = Counter(node.domain for node in members if node.domain)
    if not named or max(named.values()) < 2:
        return None, None
    smallest = min(named.values())
    told = note(
        "domain-read",
        f"{len(named)} NVLink domain(s) span nodes: {smallest} to {max(named.values())} nodes each"
        if smallest != max(named.values())
        else f"{len(named)} NVLink domain(s) of {smallest} nodes",
    )
    return smallest * gpus_per_node, told
