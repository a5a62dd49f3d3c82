"""Reads ``ray.cluster_resources()``: GPUs and nodes of a Ray cluster, in total.

Ray's sums do not say how GPUs spread over nodes; one resource ``accelerator_type:X`` is there for each node."""

from __future__ import annotations

import re

from planner.errors import InputError
from planner.machines.documents import mapping, parse
from planner.machines.inventory import Inventory
from planner.machines.text import MAX_COUNT, clean, listed, note, warning
from planner.specs.finding import Finding

TITLE = "Ray cluster resources"
_TYPE = "accelerator_type:"
_NODE = "node:"
_INTERNAL = "node:__"


def recognises(text: str) -> bool:
    """Whether the sums that Ray always prints are there."""
    return re.search(r"[\"']object_store_memory[\"']\s*:|[\"']accelerator_type:", text) is not None


def read(text: str, where: str = TITLE) -> Inventory:
    """GPUs by node; InputError where the cluster has none."""
    plain = clean(text).strip()
    documents = parse(plain, where)
    resources = {name: _number(value) for name, value in mapping(documents[0] if documents else None).items()}
    gpus = resources.get("GPU", 0)
    kinds = {name.removeprefix(_TYPE): count for name, count in resources.items() if name.startswith(_TYPE) and count}
    if not gpus:
        raise InputError(
            "the cluster has no GPU", where=where, allowed='"GPU": a number above 0', hint="is a worker up?"
        )
    nodes = sum(kinds.values())
    findings: list[Finding] = []
    if len(kinds) > 1:
        findings.append(
            warning(
                "gpus-mixed", f"nodes with several kinds of GPU: {listed(list(kinds))}; which has how many is not said"
            )
        )
    addresses = sum(name.startswith(_NODE) and not name.startswith(_INTERNAL) for name in resources)
    if nodes and gpus % nodes:
        findings.append(warning("gpus-uneven", f"{gpus} GPUs do not divide among {nodes} nodes"))
    if nodes and addresses and addresses != nodes:
        findings.append(
            note(
                "node-count-differs",
                f"nodes with GPUs: {nodes}, addresses that are listed: {addresses} (nodes without, or a cut list)",
            )
        )
    domains = [name for name in resources if name.startswith("nvlink_domain")]
    if domains:
        findings.append(
            note(
                "nvlink-domains",
                f"{len(domains)} NVLink domain(s) are known to Ray",
                where=listed(domains),
                hint="if a domain is larger than a node, write domain_gpus into the file",
            )
        )
    even = nodes > 0 and gpus % nodes == 0 and len(kinds) <= 1
    return Inventory(
        source=TITLE,
        node_count=nodes or None,
        gpus_per_node=gpus // nodes if even else None,
        product=next(iter(kinds)) if len(kinds) == 1 else None,
        findings=tuple(findings),
        # Ray's memory is what it lends to tasks, not what the hosts have, and its CPUs are threads.
        unread=tuple(name for name in ("memory", "CPU") if name in resources),
    )


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18:
        return 0
    return min(int(value), MAX_COUNT)
