"""The machines of a measured run: its accelerator from the catalogue, its node and network from what the record says.

What a record does not state is the accelerator's reference node; its network text is read for a node type, or for a
number of NICs and their rate.
"""

from __future__ import annotations

import re

from planner.accuracy.runs.skip import Skip
from planner.catalog import default_system, load_accelerator, load_system
from planner.errors import InputError
from planner.specs.cluster import Cluster, System
from planner.specs.measurement import MeasuredHardware

_NODE_TYPES = (
    ("aws-p5en", "aws-p5en"),
    ("aws-p5", "aws-p5"),
    ("aws-p4d", "aws-p4d"),
    ("grand teton", "meta-grand-teton"),
    ("a3-mega", "gcp-a3-mega"),
    ("a3-high", "gcp-a3-high"),
    ("nd-h100", "azure-nd-h100-v5"),
)
"""How a network text names a node type of the catalogue."""
_NICS = re.compile(r"(\d+)\s*x\s*(\d+)\s*gb", re.IGNORECASE)
_PER_NODE = re.compile(r"(\d+)\s*gb(?:/s|ps)?\s+\S*\s*per node", re.IGNORECASE)


def cluster_of(hardware: MeasuredHardware) -> Cluster:
    """The cluster; what is not stated is the reference node's."""
    if hardware.gpu is None or hardware.gpus is None:
        raise Skip("GPU or GPU count not stated")
    try:
        accelerator = load_accelerator(hardware.gpu)
    except InputError:
        raise Skip(f"unknown GPU {hardware.gpu[:40]!r}") from None
    text = (hardware.inter or "").lower()
    named = next((system for name, system in _NODE_TYPES if name in text), None)
    system = default_system(accelerator.id)
    if named is not None and load_system(named).accelerator == accelerator.id:
        system = load_system(named)
    per_node = hardware.gpus_per_node or system.gpus_per_node
    if hardware.gpus % per_node:
        # A job smaller than a node, or one that leaves GPUs of its nodes idle.
        per_node = next(size for size in range(min(per_node, hardware.gpus), 0, -1) if hardware.gpus % size == 0)
    share = per_node / system.gpus_per_node
    nics, rate, bus = _network(text, system, share)
    measured = share == 1 and _NICS.search(text) is None and _PER_NODE.search(text) is None
    return Cluster(
        accelerator=accelerator,
        gpus=hardware.gpus,
        gpus_per_node=per_node,
        domain_gpus=max(system.domain_gpus, per_node) if accelerator.fabric.topology != "pcie" else system.domain_gpus,
        nics_per_node=nics,
        nic_bytes_per_s=rate,
        network_bus_bytes_per_s=bus,
        network_spans=system.network_spans if measured else (),
        ring_step_s=system.ring_step_s if measured else None,
        memory_bytes_per_gpu=accelerator.memory.allocatable_bytes,
        host_memory_bytes_per_node=system.host_memory_bytes_per_node,
        host_cores_per_node=hardware.host_cores_per_node or system.host_cores_per_node,
    )


def _network(text: str, system: System, share: float) -> tuple[int, float, float | None]:
    """(NICs of a node, bytes/s of one, measured bus bandwidth of a node)."""
    stated = _NICS.search(text)
    if stated is not None:
        return int(stated[1]), int(stated[2]) * 1e9 / 8, None
    whole = _PER_NODE.search(text)
    if whole is not None:
        return 8, int(whole[1]) * 1e9 / 64, None
    bus = system.network_bus_bytes_per_s
    return max(1, round(system.nics_per_node * share)), system.nic_bytes_per_s, None if bus is None else bus * share
