"""Reads Kueue's Topology and ResourceFlavor objects: the levels of the network and which GPU a flavor stands for.

They hold no counts, so they complete another source or ``--nodes``."""

from __future__ import annotations

import re

from planner.errors import InputError
from planner.machines.documents import entries, mapping, parse, word
from planner.machines.inventory import Inventory
from planner.machines.kubernetes import GKE_NAMES
from planner.machines.text import clean, listed, note

TITLE = "Kueue topology"
_PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")


def recognises(text: str) -> bool:
    """Whether an object of Kueue's API is there."""
    return re.search(r"kueue\.x-k8s\.io/", text) is not None


def read(text: str, where: str = TITLE) -> Inventory:
    """Levels, widest first, and the GPU of the flavors; InputError where there is neither."""
    levels: tuple[str, ...] = ()
    products: dict[str, None] = {}
    for document in parse(clean(text), where):
        spec = mapping(document.get("spec"))
        if document.get("kind") == "Topology":
            levels = levels or tuple(word(level.get("nodeLabel")) for level in entries(spec.get("levels")))
        if document.get("kind") == "ResourceFlavor":
            labels = mapping(spec.get("nodeLabels"))
            stated = [word(labels[label]) for label in _PRODUCTS if word(labels.get(label))]
            products |= dict.fromkeys(GKE_NAMES.get(name, name) for name in stated)
    levels = tuple(level for level in levels if level)
    if not levels and not products:
        raise InputError(
            "neither levels nor a GPU are found",
            where=where,
            allowed="objects Topology or ResourceFlavor of Kueue",
            hint="name the output of kubectl get topologies,resourceflavors -o yaml",
        )
    between = [level for level in levels if level != "kubernetes.io/hostname"]
    findings = (
        [
            note(
                "network-levels",
                f"the scheduler can keep a job inside {' or '.join(between)}",
                hint=f'annotate the pod template: kueue.x-k8s.io/podset-required-topology: "{between[-1]}"',
            )
        ]
        if between
        else []
    )
    if len(products) > 1:
        findings.append(
            note("gpus-mixed", f"flavors for several GPUs: {listed(list(products))}", hint="choose with --gpu")
        )
    return Inventory(
        source=TITLE,
        product=next(iter(products)) if len(products) == 1 else None,
        levels=levels,
        findings=tuple(findings),
    )
