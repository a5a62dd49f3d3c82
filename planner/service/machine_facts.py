"""From what machines say about themselves to the content of a cluster file, with the origin of every value.

A value that is the same as the reference system's is left out, so that what was measured on it keeps holding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.catalog import default_system, load_accelerator, load_system
from planner.errors import InputError
from planner.machines import Inventory, Match, Node, compute_nics, identify, size_of
from planner.machines.combine import Size
from planner.machines.products import dense_flops_per_s, usable_gib
from planner.machines.text import listed, note, warning
from planner.service.machine_links import put_domain
from planner.service.machine_values import Facts
from planner.specs.cluster import Accelerator, System
from planner.specs.cluster_file import ClusterFile
from planner.units import BITS_PER_BYTE, GB, GIB, MIB, counted

INSTANCES = {
    "p4d.24xlarge": "aws-p4d",
    "p5.48xlarge": "aws-p5",
    "p5en.48xlarge": "aws-p5en",
    "p6-b200.48xlarge": "aws-p6-b200",
    "p6-b300.48xlarge": "aws-p6-b300",
    "a3-highgpu-8g": "gcp-a3-high",
    "a3-megagpu-8g": "gcp-a3-mega",
    "standard_nd96amsr_a100_v4": "azure-nd-a100-v4",
    "standard_nd96isr_h100_v5": "azure-nd-h100-v5",
    "standard_nd96isr_mi300x_v5": "azure-nd-mi300x-v5",
}
"""Machine types of clouds -> reference systems of the catalogue (each names its type in its source)."""
_ROUNDED = 1.01
"""Two rates or sizes that differ by less are the same figure."""

Options = ClusterFile
"""What the user states beside the text; it wins over what is read."""


def fill(facts: Facts, inventory: Inventory, options: Options) -> None:
    """Put in the cluster that the inventory describes; InputError where accelerator or number of nodes cannot be known.

    Findings made until then stay in ``facts``."""
    for name, value in options.model_dump(exclude_none=True).items():
        if name != "gpu":
            facts.put(name, value, "option")
    _some_whole(inventory)
    stated = None if options.gpu is None else load_accelerator(options.gpu)
    if stated is not None:
        inventory = _of_kind(inventory, stated, facts)
    size = _size(inventory, options, _chosen_count(inventory, stated), facts)
    kinds = _kinds(inventory, size, facts)
    accelerator = _named(inventory, kinds, facts) if stated is None else _stated(stated, kinds, facts)
    system = _system(size, accelerator, facts)
    put_domain(inventory, size, accelerator, system, facts)
    _network(inventory, size, system, facts)
    _host(inventory, size, facts)


# -- which GPU ---------------------------------------------------------------------------------------------------------


def _some_whole(inventory: Inventory) -> None:
    if not inventory.devices or any(device.whole for device in inventory.devices):
        return
    if all(device.mig for device in inventory.devices):
        raise InputError(
            "every GPU is split into MIG instances, which cannot train together",
            where=inventory.source,
            hint="switch MIG off on the GPUs of the job: nvidia-smi -i 0 -mig 0",
        )
    raise InputError("no GPU of the machine can be used", where=inventory.source, hint="the findings say why")


def _of_kind(inventory: Inventory, accelerator: Accelerator, facts: Facts) -> Inventory:
    """Only the nodes that have the stated accelerator, where any names it."""
    fitting = [node for node in inventory.nodes if _means(_product(node), accelerator, node.memory_mib)]
    others = [node for node in inventory.nodes if _product(node) and node not in fitting]
    if not fitting or not others:
        return inventory
    facts.findings.append(
        note("nodes-of-other-kind", f"nodes without {accelerator.id} are left out: {listed([n.name for n in others])}")
    )
    return replace(inventory, nodes=tuple(node for node in inventory.nodes if node not in others))


def _chosen_count(inventory: Inventory, stated: Accelerator | None) -> int | None:
    """GPUs a node of the alternative that --gpu chooses."""
    if stated is None:
        return None
    return next((count for name, count in inventory.alternatives if _means(name, stated)), None)


def _product(node: Node) -> str:
    """The node's GPU; that of the cloud's machine type where no label names it or its variant."""
    system = INSTANCES.get((node.instance or "").lower())
    if system is None:
        return node.product or ""
    built = load_system(system).accelerator
    if not node.product:
        return built
    try:
        match = identify(node.product, node.memory_mib)
    except InputError:
        return node.product
    open_to_choice = any(finding.id == "variant-assumed" for finding in match.findings)
    same = built.partition("-")[0] == match.accelerator.id.partition("-")[0]
    return built if open_to_choice and same else node.product


def _kinds(inventory: Inventory, size: Size, facts: Facts) -> list[tuple[str, int | None]]:
    """(name, MiB) of every kind of whole GPU, from the driver, else from the nodes that count, else the scheduler."""
    devices = [device for device in inventory.devices if device.name and device.whole]
    if devices:
        return list(dict.fromkeys((device.name or "", device.memory_mib) for device in devices))
    named = [(_product(node), node.memory_mib) for node in size.members]
    if any(name for name, _ in named):
        silent = [node.name for node in size.members if not _product(node)]
        if silent:
            facts.findings.append(
                warning(
                    "gpu-not-named",
                    f"{len(silent)} of {len(named)} nodes do not name their GPU and are taken to be like the others",
                    where=listed(silent),
                )
            )
        return list(dict.fromkeys((name, memory) for name, memory in named if name))
    return [(inventory.product, None)] if inventory.product else []


def _named(inventory: Inventory, kinds: Sequence[tuple[str, int | None]], facts: Facts) -> Accelerator:
    """The accelerator that the text names; the slowest of several, with the least memory of all."""
    if inventory.alternatives:
        raise InputError(
            "several accelerators would be taken",
            where=inventory.source,
            got=", ".join(f"{name}:{count}" for name, count in inventory.alternatives)[:200],
            hint="choose the one to plan for with --gpu, and compare the plans",
        )
    if not kinds:
        raise InputError(
            "the text does not name the GPU",
            where=inventory.source,
            allowed="an accelerator of `planner gpus`",
            hint="add --gpu NAME (`planner gpus`), or --with a file of `rocm-smi --showproductname --showmeminfo vram`"
            if inventory.source.startswith(("rocm", "amd"))
            else "add --gpu h100, or --with a file of `nvidia-smi --query-gpu=name,memory.total --format=csv`",
        )
    matches, unknown = [], None
    for name, memory in kinds:
        try:
            matches.append(identify(name, memory))
        except InputError as problem:
            unknown = unknown or problem
    facts.findings += [finding for match in matches for finding in match.findings]
    if unknown is not None:
        raise unknown
    makers = {match.accelerator.vendor for match in matches}
    if len(makers) > 1:
        raise InputError(
            f"no job spans GPUs of {' and '.join(sorted(makers))}",
            where=inventory.source,
            got=", ".join(dict.fromkeys(name for name, _ in kinds))[:200],
            hint="--gpu plans with the nodes of one kind",
        )
    chosen = min(matches, key=lambda match: (dense_flops_per_s(match.accelerator), _usable(match)))
    names = ", ".join(f"{name}" + (f", {memory} MiB" if memory else "") for name, memory in kinds)
    facts.put("gpu", chosen.accelerator.id, names[:100])
    ids = list(dict.fromkeys(match.accelerator.id for match in matches))
    if len(ids) > 1:
        facts.findings.append(
            warning(
                "gpus-mixed-planned",
                f"planned as {chosen.accelerator.id}, the slowest of {', '.join(ids)}",
                hint="--gpu plans with the nodes of one kind only",
            )
        )
    least = min(_usable(match) for match in matches)
    if chosen.memory_gib is not None or least < chosen.accelerator.memory.allocatable_bytes / GIB:
        facts.put(
            "memory_gib_per_gpu", round(least, 2), "smallest GPU" if len(kinds) > 1 else "memory printed, 1.5 % off"
        )
    return chosen.accelerator


def _usable(match: Match) -> float:
    return match.memory_gib or match.accelerator.memory.allocatable_bytes / GIB


def _stated(accelerator: Accelerator, kinds: Sequence[tuple[str, int | None]], facts: Facts) -> Accelerator:
    """The accelerator of --gpu; the memory that the text tells still counts."""
    facts.put("gpu", accelerator.id, "--gpu")
    facts.findings += identify(accelerator.id).findings
    others = [kind for kind, memory in kinds if not _means(kind, accelerator, memory)]
    if others:
        facts.findings.append(
            warning("gpu-overridden", f"--gpu says {accelerator.id}, the text {listed(others)}: the option is taken")
        )
    memories = [memory for _, memory in kinds]
    known = accelerator.memory.allocatable_bytes / GIB
    sizes = [usable_gib(accelerator, memory) or known for memory in memories]
    if sizes and min(sizes) != known:
        facts.put("memory_gib_per_gpu", min(sizes), "memory printed, 1.5 % off")
    return accelerator


def _means(name: str, accelerator: Accelerator, memory_mib: int | None = None) -> bool:
    try:
        return identify(name, memory_mib).accelerator.id == accelerator.id
    except InputError:
        return False


# -- how many ----------------------------------------------------------------------------------------------------------


def _size(inventory: Inventory, options: Options, chosen: int | None, facts: Facts) -> Size:
    size = size_of(inventory, options.gpus_per_node or chosen)
    facts.findings += size.findings
    if size.nodes == 0 or size.gpus_per_node == 0:
        wanted = f" with {options.gpus_per_node} GPUs" if options.gpus_per_node else ""
        raise InputError(
            f"no node{wanted} can be given to a job",
            where=inventory.source,
            got=f"{len(inventory.nodes)} nodes: " + listed([node.name for node in inventory.nodes]),
            hint="the findings say why each is left out",
        )
    facts.put("gpus_per_node", size.gpus_per_node, _origin_of_count(inventory))
    if options.nodes is None and size.nodes is None:
        if not inventory.devices:
            raise InputError(
                "the number of nodes is not said", where=inventory.source, hint="add --nodes N, for example --nodes 8"
            )
        facts.findings.append(
            note("one-machine", "one machine was read, so one node is planned", hint="--nodes N for more like it")
        )
    facts.put("nodes", size.nodes or 1, "nodes that were read" if size.nodes else "one machine")
    return size


def _origin_of_count(inventory: Inventory) -> str:
    if any(node.gpus is not None for node in inventory.nodes):
        return "GPUs of a node that a job can be given"
    return "GPUs that were listed" if inventory.devices else "scheduler"


# -- links, network, host ----------------------------------------------------------------------------------------------


def _system(size: Size, accelerator: Accelerator, facts: Facts) -> System:
    """The reference system: the cloud's machine type where the catalogue has it."""
    kinds = {(node.instance or "").lower() for node in size.members}
    name = INSTANCES.get(kinds.pop()) if len(kinds) == 1 else None
    if name is not None and load_system(name).accelerator == accelerator.id:
        facts.put("system", name, f"machine type {size.members[0].instance}")
        return load_system(name)
    return default_system(accelerator.id)


def _network(inventory: Inventory, size: Size, system: System, facts: Facts) -> None:
    """Cards that carry the job and their rate; the reference's where they are the same."""
    cards = compute_nics(inventory.nics)
    known_type = facts.values.get("system") == system.id
    count = len(cards) or (min((node.nics for node in size.members if node.nics), default=0) if known_type else 0)
    rate = max((card.gbps for card in cards if card.gbps is not None), default=None)
    if inventory.nics and not cards:
        facts.findings.append(
            warning(
                "no-network",
                f"none of {len(inventory.nics)} ports is up: what is planned is the network of {system.id}, not "
                "what is there now",
                hint="check cables and subnet manager; --nics N --nic-gbps RATE plans with others",
            )
        )
    if not count and rate is None:
        return
    known = system.nic_bytes_per_s * BITS_PER_BYTE / GB
    whole = facts.values.get("gpus_per_node", system.gpus_per_node) == system.gpus_per_node
    stated = "nics_per_node" in facts.values or "nic_gbps" in facts.values
    if whole and not stated and count == system.nics_per_node and (rate is None or _same(rate, known)):
        facts.as_reference.append(f"{counted(count, 'network card')} a node")
        return
    origin = "cards near a GPU" if any(card.near for card in cards) else "cards that are up" if cards else "node"
    facts.put("nics_per_node", count or None, origin)
    if rate is None and not known_type and count != system.nics_per_node and "nic_gbps" not in facts.values:
        facts.findings.append(
            warning(
                "nic-rate-assumed",
                f"{counted(count, 'network card')}, of which no text says the rate: {known:g} Gbit/s each is that of "
                f"{system.id}, which has {system.nics_per_node}",
                hint="add --with a file of `ibstat`, or --nics N --nic-gbps RATE",
            )
        )
    if rate is not None and rate > 0:
        facts.put("nic_gbps", rate, "rate of the cards")


def _same(a: float, b: float) -> bool:
    return a <= b * _ROUNDED and b <= a * _ROUNDED


def _host(inventory: Inventory, size: Size, facts: Facts) -> None:
    least = _least([node.host_memory_mib for node in size.members])
    memory = least or inventory.host_memory_mib
    origin = "scheduler" if least is None else "least of the nodes" if len(size.members) > 1 else "node"
    if memory:
        facts.put("host_memory_gib", round(memory * MIB / GIB, 1), origin)
    cores = _least([node.cores for node in size.members]) or inventory.host_cores
    facts.put("host_cores", cores, "least of the nodes" if len(size.members) > 1 else "node")


def _least(values: Sequence[int | None]) -> int | None:
    return min((value for value in values if value), default=None)
