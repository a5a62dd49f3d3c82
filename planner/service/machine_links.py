"""What the links between GPUs say about a cluster: how many GPUs the fast ones join, and whether they are all there.

The catalogue's rates are those of an accelerator with every link up; a machine with fewer is told, not priced."""

from __future__ import annotations

import math

from planner.catalog import accelerator_ids, load_accelerator
from planner.machines import Inventory, domain_of
from planner.machines.combine import Size
from planner.machines.links import NVLINK_BYTES_PER_S, nvlinks_of_each
from planner.machines.text import note, warning
from planner.machines.topo import fast_components
from planner.service.machine_values import Facts
from planner.specs.cluster import Accelerator, System
from planner.specs.finding import Finding
from planner.units import counted


def put_domain(inventory: Inventory, size: Size, accelerator: Accelerator, system: System, facts: Facts) -> None:
    """GPUs of a fast-link domain where it is not what the reference system says, and findings about the links."""
    per_node = facts.values.get("gpus_per_node", system.gpus_per_node)
    facts.findings += _about_count(inventory, accelerator)
    spanning, told = domain_of(size.members, per_node)
    if spanning is not None and told is not None:
        facts.findings.append(told)
        if spanning != system.domain_gpus:
            facts.put("domain_gpus", spanning, "nodes of one NVLink domain")
        return
    links = inventory.links
    if links is None or len(links.matrix) < 2:
        return
    islands = fast_components(links.matrix)
    linked = len(islands) < len(links.matrix)
    if accelerator.fabric.topology == "pcie":
        if linked:
            facts.findings.append(_bridges(accelerator))
        return
    if not linked and accelerator.fabric.topology != "none":
        facts.findings.append(_missing(accelerator))
    joined = min(math.gcd(*(len(island) for island in islands)), per_node)
    if len(islands) > 1:
        facts.put("domain_gpus", joined, "islands of fast links")
    elif joined > system.domain_gpus:
        facts.put("domain_gpus", joined, "fast links join all")


def _bridges(accelerator: Accelerator) -> Finding:
    return note(
        "bridges-not-priced",
        f"NVLink bridges of {accelerator.id} are not priced: plans count PCIe everywhere, bridged pairs are faster",
    )


def _missing(accelerator: Accelerator) -> Finding:
    nvidia = accelerator.vendor == "nvidia"
    return warning(
        "fast-links-missing",
        f"{accelerator.id} has {accelerator.fabric.kind}, but no pair uses it here: every group is planned over the "
        "network cards",
        hint="`nvidia-smi topo -mp` leaves NVLink out, -m shows it; else check the fabric manager (systemctl status "
        "nvidia-fabricmanager), or whether a VM hides it"
        if nvidia
        else "check whether a VM or a partition mode hides it",
    )


def _about_count(inventory: Inventory, accelerator: Accelerator) -> list[Finding]:
    """Whether each GPU uses as many NVLinks as its kind has; other counts are another kind, or links that are down."""
    rate = NVLINK_BYTES_PER_S.get(accelerator.fabric.kind)
    if rate is None:
        return []
    built = round(accelerator.fabric.bytes_per_s / rate)
    listed = tuple(device.nvlinks for device in inventory.devices if device.whole and device.nvlinks is not None)
    matrix = () if inventory.links is None else nvlinks_of_each(inventory.links.matrix, built)
    counts = [count for count in listed or matrix if count]
    if not counts or min(counts) == max(counts) == built:
        return []
    seen = min(counts) if min(counts) < built else max(counts)
    others = [
        other.id
        for other in map(load_accelerator, accelerator_ids())
        if other.architecture == accelerator.architecture
        and seen == round(other.fabric.bytes_per_s / NVLINK_BYTES_PER_S.get(other.fabric.kind, math.inf))
    ]
    slower = f": links are up to {built / seen:.1f} times slower than planned" if seen < built else ""
    return [
        warning(
            "nvlink-count",
            f"a GPU uses {counted(seen, 'NVLink')} here, {accelerator.id} has {built}{slower}",
            hint=(f"{' or '.join(others)} has {seen}: --gpu; " if others else "")
            + "`nvidia-smi nvlink --status` shows links that are down",
        )
    ]
