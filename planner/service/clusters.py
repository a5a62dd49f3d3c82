"""From options and a cluster file to the machines of a job.

What is not given comes from the accelerator's reference system.
Every filled-in value is returned as an assumption, so that the answer can say what it rests on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner.catalog import default_system, load_accelerator, load_system
from planner.cost.context import HOST_MEMORY_SHARE
from planner.errors import InputError
from planner.service.inputs import checked_float, checked_int, checked_text, read_mapping
from planner.service.requests import ClusterInput
from planner.specs.cluster import Accelerator, Cluster, System
from planner.specs.cluster_file import LEAST, MAX_GPUS, ClusterFile
from planner.specs.plan import Assumption
from planner.specs.problems import input_error
from planner.units import BITS_PER_BYTE, GB, GIB

GPU_HINT = "name an accelerator of `planner gpus`, for example --gpu h100"
DEVICE_OVERHEAD_NOTE = "what an allocator can reach on this accelerator"
SHARED_MEMORY_NOTE = "an equal part of the machine's memory, less a tenth for everything else on it"
THIS_MACHINE = "this machine, as the operating system says"


@dataclass(frozen=True)
class ResolvedCluster:
    cluster: Cluster
    assumptions: tuple[Assumption, ...]


def resolve_cluster(given: ClusterInput) -> ResolvedCluster:
    """The cluster meant by options and file, and what was assumed for the rest."""
    return resolve_file(_merged(given))


def resolve_file(wanted: ClusterFile) -> ResolvedCluster:
    """The cluster that the content of a file means, and what was assumed for the rest."""
    if wanted.gpu is None and wanted.system is None:
        raise InputError("no accelerator is given", where="--gpu", hint=GPU_HINT)
    system = load_system(wanted.system) if wanted.system else default_system(load_accelerator(wanted.gpu or "").id)
    accelerator = load_accelerator(wanted.gpu or system.accelerator)
    if system.accelerator != accelerator.id:
        raise InputError(
            "the reference system has another accelerator",
            where="system",
            got=f"{system.id} with {system.accelerator}",
            allowed=f"a system with {accelerator.id}",
            hint="leave out system or gpu",
        )
    return _filled(wanted, accelerator, system)


def _merged(given: ClusterInput) -> ClusterFile:
    """Options over file; options are checked here, the file by its spec."""
    options = checked_options(given)
    base = _read(given.file) if given.file is not None else {}
    if "gpus" in options or "nodes" in options:
        base = {name: value for name, value in base.items() if name not in ("gpus", "nodes")}
    return ClusterFile(**{**base, **options})


def checked_options(given: ClusterInput) -> dict[str, Any]:
    """Field of a cluster file -> the value that an option gives; InputError names the option."""
    checked: dict[str, Any] = {
        "gpu": None if given.gpu is None else checked_text(given.gpu, "--gpu", GPU_HINT),
        "gpus": _whole(given.gpus, "--gpus", MAX_GPUS),
        "nodes": _whole(given.nodes, "--nodes", MAX_GPUS),
        "gpus_per_node": _whole(given.gpus_per_node, "--gpus-per-node", 1024),
        "nics_per_node": _whole(given.nics, "--nics", 1024),
        "nic_gbps": _real(given.nic_gbps, "--nic-gbps", LEAST, 100_000),
        "oversubscription": _real(given.oversubscription, "--oversubscription", 1, 1000),
        "host_memory_gib": _real(given.host_memory_gib, "--host-memory-gib", LEAST, 10_000_000),
        "price_usd_per_gpu_hour": _real(given.price, "--price", 0, 1_000_000),
    }
    return {field: value for field, value in checked.items() if value is not None}


def _whole(value: int | None, where: str, high: int) -> int | None:
    return None if value is None else checked_int(value, where, 1, high)


def _real(value: float | None, where: str, low: float, high: float) -> float | None:
    return None if value is None else checked_float(value, where, low, high)


def _read(path: Path | ClusterFile) -> dict[str, Any]:
    if isinstance(path, ClusterFile):
        return path.model_dump(exclude_none=True)
    content = read_mapping(path, "--cluster")
    try:
        spec = ClusterFile.model_validate(content, strict=True)
    except ValidationError as problem:
        raise input_error(problem, str(path), ClusterFile.model_fields) from problem
    return spec.model_dump(exclude_none=True)


class _Filler:
    """Takes given values and notes the ones that had to be filled in."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.assumptions: list[Assumption] = []

    def take(self, field: str, given: Any, fallback: Any, shown: Any = None, why: str = "") -> Any:
        if given is not None:
            return given
        reason = why or f"reference system {self.system.id}"
        self.assumptions.append(
            Assumption(field=f"cluster.{field}", value=fallback if shown is None else shown, why=reason)
        )
        return fallback


def _counts(wanted: ClusterFile, per_node: int) -> int:
    """GPUs of the job from --gpus and --nodes, which must agree."""
    if wanted.gpus is None and wanted.nodes is None:
        raise InputError("the number of GPUs is not given", where="--gpus", hint="for example --gpus 64, or --nodes 8")
    if wanted.nodes is None:
        return wanted.gpus or 0
    product = wanted.nodes * per_node
    if wanted.gpus is not None and wanted.gpus != product:
        raise InputError(
            f"nodes({wanted.nodes}) * gpus_per_node({per_node}) = {product}, but gpus = {wanted.gpus}",
            where="--nodes",
            got=str(wanted.nodes),
            hint="give only one of --gpus and --nodes, or set --gpus-per-node",
        )
    return checked_int(product, "--nodes", 1, MAX_GPUS)


def _filled(wanted: ClusterFile, accelerator: Accelerator, system: System) -> ResolvedCluster:
    filler = _Filler(system)
    take = filler.take
    per_node = take("gpus_per_node", wanted.gpus_per_node, system.gpus_per_node)
    gpus = _counts(wanted, per_node)
    if gpus > per_node and gpus % per_node:
        below, above = gpus - gpus % per_node, gpus - gpus % per_node + per_node
        raise InputError(
            f"gpus({gpus}) % gpus_per_node({per_node}) = {gpus % per_node}: the GPUs do not fill whole nodes",
            where="--gpus",
            got=str(gpus),
            allowed=f"a multiple of {per_node}, or at most {per_node}",
            hint=f"use --gpus {below} or --gpus {above}, or say --gpus-per-node",
        )
    # A node size of one's own changes how much of the reference network and host there is.
    share = per_node / system.gpus_per_node
    nics = take("nics_per_node", wanted.nics_per_node, max(1, round(system.nics_per_node * share)))
    nic_rate = take(
        "nic_bytes_per_s",
        wanted.nic_gbps and wanted.nic_gbps * GB / BITS_PER_BYTE,
        system.nic_bytes_per_s,
        shown=f"{system.nic_bytes_per_s * BITS_PER_BYTE / GB:g} Gbit/s",
    )
    domain = min(system.domain_gpus, per_node) if system.domain_gpus <= system.gpus_per_node else system.domain_gpus
    if accelerator.synchronous:
        wanted = _of_this_machine(filler, wanted)
    host_bytes = max(1, round(system.host_memory_bytes_per_node * share))
    usable = accelerator.memory.allocatable_bytes
    if accelerator.synchronous:
        usable = round((wanted.host_memory_gib or 0.0) * GIB * HOST_MEMORY_SHARE / min(gpus, per_node))
    network_is_reference = wanted.nics_per_node is None and wanted.nic_gbps is None and share == 1
    cluster = Cluster(
        accelerator=accelerator,
        gpus=gpus,
        gpus_per_node=per_node,
        domain_gpus=take("domain_gpus", wanted.domain_gpus, domain),
        nics_per_node=nics,
        nic_bytes_per_s=nic_rate,
        network_bus_bytes_per_s=system.network_bus_bytes_per_s if network_is_reference else None,
        network_spans=system.network_spans if network_is_reference else (),
        ring_step_s=system.ring_step_s if network_is_reference else None,
        oversubscription=take("oversubscription", wanted.oversubscription, 1.0, why="a full-bisection network"),
        memory_bytes_per_gpu=take(
            "memory_bytes_per_gpu",
            wanted.memory_gib_per_gpu and round(wanted.memory_gib_per_gpu * GIB),
            usable,
            shown=f"{usable / GIB:.1f} GiB",
            why=DEVICE_OVERHEAD_NOTE if not accelerator.synchronous else SHARED_MEMORY_NOTE,
        ),
        host_memory_bytes_per_node=take(
            "host_memory_bytes_per_node",
            wanted.host_memory_gib and round(wanted.host_memory_gib * GIB),
            host_bytes,
            shown=f"{host_bytes / GIB:.0f} GiB",
        ),
        host_cores_per_node=take(
            "host_cores_per_node", wanted.host_cores, max(1, round(system.host_cores_per_node * share))
        ),
        nvme_bytes_per_s=wanted.nvme_gb_per_s and wanted.nvme_gb_per_s * GB,
        usd_per_gpu_hour=_price(filler, wanted, accelerator),
    )
    return ResolvedCluster(cluster, tuple(filler.assumptions))


def _of_this_machine(filler: _Filler, wanted: ClusterFile) -> ClusterFile:
    """Cores and memory of the machine that plans, where the processor is the accelerator and nobody names another's."""
    cores, size = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return wanted.model_copy(
        update={
            "host_cores": filler.take("host_cores_per_node", wanted.host_cores, cores, why=THIS_MACHINE),
            "host_memory_gib": filler.take(
                "host_memory_bytes_per_node",
                wanted.host_memory_gib,
                size / GIB,
                shown=f"{size / GIB:.1f} GiB",
                why=THIS_MACHINE,
            ),
        }
    )


def _price(filler: _Filler, wanted: ClusterFile, accelerator: Accelerator) -> float | None:
    known = accelerator.price.mid_usd
    if wanted.price_usd_per_gpu_hour is not None or known is None:
        return wanted.price_usd_per_gpu_hour
    price: float = filler.take(
        "usd_per_gpu_hour", None, known, why=f"on-demand price of {accelerator.id}, {accelerator.price.as_of}"
    )
    return price


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """The same machines, fewer or more of them."""
    return Cluster.model_validate({**{name: getattr(cluster, name) for name in Cluster.model_fields}, "gpus": gpus})
