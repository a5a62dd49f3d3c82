"""What a machine says about itself, in one shape for every source: GPUs, links, network cards, nodes, and what to know.

Nothing is decided here: a field is None where the text says nothing, and which accelerator of the catalogue is meant
is for ``products``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.specs.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU of one machine."""

    index: int
    name: str | None = None
    """As the driver prints it."""
    memory_mib: int | None = None
    """All of it, as the driver counts."""
    used_mib: int | None = None
    mig: bool = False
    """Split into MIG instances, so no whole GPU for a job."""
    failed: bool = False
    """The driver knows it and cannot reach it."""
    nvlinks: int | None = None
    """NVLinks that are up."""
    link_width: int | None = None
    """PCIe lanes in use."""
    full_link_width: int | None = None
    """PCIe lanes that card and slot could use."""
    numa: int | None = None

    @property
    def whole(self) -> bool:
        """Whether a job can be given all of it."""
        return not (self.mig or self.failed)


@dataclass(frozen=True, kw_only=True)
class Nic:
    """One port of a network card."""

    name: str
    label: str = ""
    """What a topology matrix calls it (NIC0)."""
    gbps: float | None = None
    """Line rate, Gbit/s, one direction."""
    layer: str | None = None
    """InfiniBand or Ethernet."""
    active: bool | None = None
    near: tuple[int, ...] | None = None
    """GPUs under the same PCIe switch; empty: none; None: the text does not say."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """How the GPUs of one machine reach each other."""

    matrix: tuple[tuple[str, ...], ...]
    """Kind of link between each two GPUs in order of index: X, NV18, XGMI, PIX, PXB, PHB, NODE, SYS."""
    rails: Mapping[int, str] = field(default_factory=dict)
    """GPU -> label of the network card under its own PCIe switch."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine as a scheduler or launcher knows it."""

    name: str
    gpus: int | None = None
    """Whole GPUs that the machine has."""
    usable_gpus: int | None = None
    """Whole GPUs that a job can be given; None: all of them."""
    slices: int = 0
    """MIG instances offered beside whole GPUs."""
    busy_gpus: int = 0
    """GPUs that other jobs hold now."""
    product: str | None = None
    memory_mib: int | None = None
    """Of one GPU."""
    host_memory_mib: int | None = None
    cores: int | None = None
    """Physical cores."""
    nics: int | None = None
    nic_gbps: float | None = None
    instance: str | None = None
    """The cloud's name of the machine type."""
    domain: str | None = None
    """Name of the NVLink domain that the machine is part of."""
    usable: bool = True
    """Whether a job can be placed here."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What one text says; several are joined by ``combine``."""

    source: str
    """What was recognised, for people: ``nvidia-smi topo -m``."""
    devices: tuple[Device, ...] = ()
    """GPUs of one machine; the others are taken to be like it."""
    machines: int | None = None
    """Machines whose GPUs were listed, where more than one was."""
    links: Links | None = None
    nics: tuple[Nic, ...] = ()
    nodes: tuple[Node, ...] = ()
    node_count: int | None = None
    """Where only their number is known."""
    gpus_per_node: int | None = None
    product: str | None = None
    """GPU that a scheduler names for every node."""
    alternatives: tuple[tuple[str, int], ...] = ()
    """(GPU, count on a node): any one of these would be taken."""
    host_memory_mib: int | None = None
    host_cores: int | None = None
    levels: tuple[str, ...] = ()
    """Levels of the network that a scheduler knows, widest first."""
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()
    """Parts that bear on speed or memory and could not be read or have no place here."""
