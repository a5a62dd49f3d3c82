"""Reads Kubernetes nodes (``kubectl get nodes -o json`` or yaml): GPUs that a job can be given, host, cloud type.

Labels say what was built in, ``allocatable`` what can be given: MIG slices, shares of one GPU and withdrawn devices
make them differ (NVIDIA/k8s-device-plugin#1501)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import InputError
from planner.machines.documents import entries, mapping, parse, word
from planner.machines.inventory import Inventory, Node
from planner.machines.text import MAX_COUNT, clean, listed, note, warning, whole
from planner.specs.finding import Finding
from planner.units import MIB, counted, gib

TITLE = "Kubernetes nodes"
HINT = "give the output of `kubectl get nodes -o json`"

_QUANTITY = re.compile(r"^([0-9]{1,18}(?:\.[0-9]{1,18})?)(Ki|Mi|Gi|Ti|Pi|Ei|m|k|K|M|G|T|P|E|(?:[eE][0-9]{1,2}))?$")
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)
}
"""Suffixes of resource quantities (apimachinery/pkg/api/resource)."""
_RESOURCES = (
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "amd.com/gpu",
    "habana.ai/gaudi",
    "google.com/tpu",
    "aws.amazon.com/neurondevice",
)
"""Whole accelerators, as the vendors' device plugins name them."""
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-tpu-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "k8s.amazonaws.com/accelerator",
    "amd.com/gpu.device-id",
    "beta.amd.com/gpu.device-id",
)
"""Labels that name the accelerator, the most exact first."""
_GKE = "cloud.google.com/gke-accelerator"
GKE_NAMES = {
    "nvidia-tesla-v100": "V100-SXM2-16GB",
    "nvidia-tesla-a100": "A100-SXM4-40GB",
    "nvidia-a100-80gb": "A100-SXM4-80GB",
    "nvidia-h100-80gb": "H100-SXM5-80GB",
    "nvidia-h100-mega-80gb": "H100-SXM5-80GB",
}
"""Google Cloud rents one variant under each of these names (its list of GPU machine types)."""
_AMD_DEVICE = re.compile(r"^(?:beta\.)?amd\.com/gpu\.device-id\.([0-9a-f]{4})$")
"""Label of AMD's node labeller that has the device id in its name and the count as its value."""
_SHARED = "-SHARED"
_MIG_PRODUCT = re.compile(r"-MIG-[0-9]+[cg]\.", re.IGNORECASE)
_MIG_RESOURCE = "nvidia.com/mig-"
_EFA = "vpc.amazonaws.com/efa"
_NO_CLIQUE = re.compile(r"^[0-]*\.?0*$")
_INSTANCE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_SMT = "feature.node.kubernetes.io/cpu-hardware_multithreading"
_LEVEL = re.compile(
    r"topology[-./](?:block|rack|leaf|spine|zone-group|network-node-layer)|/(?:block|rack|superblock)\b"
)
_MOST_TOLERANCE = 0.02


def recognises(text: str) -> bool:
    """Whether a node is there; cheap, the text is parsed by ``read``."""
    if "allocatable" in text and re.search(r"(?:nvidia|amd)\.com/gpu", text):
        return True
    return re.search(r"[\"']?kind[\"']?\s*:\s*[\"']?Node[\"']?\s*(?:[,}\n\r]|$)", text) is not None


def read(text: str, where: str = TITLE) -> Inventory:
    """Nodes with GPUs; InputError where there is none."""
    found = [item for document in parse(clean(text), where) for item in _items(document)]
    if not found:
        raise InputError("no node is found", where=where, allowed="objects of kind Node", hint=HINT)
    nodes: list[Node] = []
    findings: list[Finding] = []
    levels: tuple[str, ...] = ()
    without: list[str] = []
    unread: dict[str, None] = {}
    for item in found[:MAX_COUNT]:
        facts = _Facts.of(item, f"node {len(nodes) + len(without)}")
        node = _node(facts, findings)
        if node is None:
            without.append(facts.name)
            continue
        nodes.append(node)
        levels = levels or tuple(label for label in facts.labels if _LEVEL.search(label))
        unread |= dict.fromkeys(name for name in facts.allocatable if name.startswith(("rdma/", "nvidia.com/hostdev")))
    if not nodes:
        raise InputError(
            "no node has accelerators",
            where=where,
            got=listed(without),
            allowed=" or ".join(_RESOURCES[::2]) + " in status.capacity",
            hint="is the device plugin running? " + HINT,
        )
    if without:
        findings.append(
            note("node-without-gpus", f"left out: {counted(len(without), 'node')} without GPUs", where=listed(without))
        )
    findings.append(
        note(
            "pods-not-visible",
            "nodes do not say which GPUs other pods hold now",
            hint="kubectl describe node NAME shows them under `Allocated resources`",
        )
    )
    return Inventory(source=TITLE, nodes=tuple(nodes), levels=levels, findings=tuple(findings), unread=tuple(unread))


def _items(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if document.get("kind") == "Node":
        return [mapping(document)]
    return [item for item in entries(document.get("items")) if item.get("kind", "Node") == "Node"]


def quantity(value: object) -> float | None:
    """A resource quantity (``191450m``, ``2029Gi``, ``1e3``, ``8``) as a number, else None."""
    match = _QUANTITY.match(word(value).strip())
    if match is None:
        return None
    suffix = match[2] or ""
    number = float(match[1]) * (10.0 ** int(suffix[1:]) if len(suffix) > 1 and suffix[1:].isdigit() else _UNITS[suffix])
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class _Facts:
    """One node, as far as it is read."""

    name: str
    labels: Mapping[str, str]
    capacity: Mapping[str, float]
    allocatable: Mapping[str, float]
    ready: bool
    cordoned: bool

    @classmethod
    def of(cls, item: Mapping[str, Any], fallback: str) -> _Facts:
        meta, status = mapping(item.get("metadata")), mapping(item.get("status"))
        conditions = {word(entry.get("type")): word(entry.get("status")) for entry in entries(status.get("conditions"))}
        capacity = _numbers(status.get("capacity"))
        return cls(
            name=word(meta.get("name")) or fallback,
            labels={key: word(value) for key, value in mapping(meta.get("labels")).items()},
            capacity=capacity,
            allocatable=_numbers(status.get("allocatable")) or capacity,
            ready=conditions.get("Ready", "True") == "True",
            cordoned=mapping(item.get("spec")).get("unschedulable") is True,
        )

    def whole(self, label: str) -> int | None:
        return whole(self.labels.get(label), 100_000_000)


def _numbers(value: object) -> dict[str, float]:
    read_ones = {name: quantity(entry) for name, entry in mapping(value).items()}
    return {name: number for name, number in read_ones.items() if number is not None}


def _node(facts: _Facts, findings: list[Finding]) -> Node | None:
    """The node, with what there is to say about it added to ``findings``; None without accelerators."""
    resource = next((name for name in _RESOURCES if facts.capacity.get(name) or facts.allocatable.get(name)), None)
    slices = sum(int(count) for name, count in facts.allocatable.items() if name.startswith(_MIG_RESOURCE))
    if resource is None and not slices:
        return None
    gpus, usable = _gpus(facts, resource, slices, findings)
    product = _product(facts.labels)
    memory = facts.whole("nvidia.com/gpu.memory") if product and not _MIG_PRODUCT.search(product) else None
    clique = facts.labels.get("nvidia.com/gpu.clique", "")
    nics = int(facts.allocatable.get(_EFA, 0)) or None
    return Node(
        name=facts.name,
        gpus=gpus,
        usable_gpus=usable,
        slices=slices,
        product=_plain(product) if product else None,
        memory_mib=memory,
        host_memory_mib=_host_memory(facts, findings),
        cores=_cores(facts, findings),
        nics=nics if nics and nics <= 1024 else None,
        instance=next((facts.labels[label] for label in _INSTANCE if facts.labels.get(label)), None),
        domain=None if _NO_CLIQUE.match(clique) else clique,
        usable=_schedulable(facts, findings),
    )


def _product(labels: Mapping[str, str]) -> str | None:
    """What the first label that names the accelerator says."""
    label = next((label for label in _PRODUCTS if labels.get(label)), None)
    if label is None:
        return next((found[1] for name in labels if (found := _AMD_DEVICE.match(name)) is not None), None)
    return GKE_NAMES.get(labels[label], labels[label]) if label == _GKE else labels[label]


def _plain(product: str) -> str:
    """The product without what sharing and MIG append to it."""
    return _MIG_PRODUCT.split(product)[0].removesuffix(_SHARED)


def _gpus(facts: _Facts, resource: str | None, slices: int, findings: list[Finding]) -> tuple[int, int]:
    """(whole GPUs built in, whole GPUs that can be given)."""
    given = _count(facts.allocatable.get(resource or "", 0))
    product = facts.labels.get("nvidia.com/gpu.product", "")
    built = facts.whole("nvidia.com/gpu.count")
    if _MIG_PRODUCT.search(product):
        findings.append(
            warning(
                "mig-enabled",
                f"{facts.name} offers {given} MIG slices as GPUs; slices cannot train together, so none is counted",
                where=facts.name,
                hint="set nvidia.com/mig.config=all-disabled on the node",
            )
        )
        return 0, 0
    replicas = facts.whole("nvidia.com/gpu.replicas") or 1
    if replicas > 1 or product.endswith(_SHARED) or resource == "nvidia.com/gpu.shared":
        physical = built or max(1, given // replicas)
        findings.append(
            warning(
                "gpu-shared",
                f"{facts.name} offers {given} shares of {counted(physical, 'GPU')} ({replicas} each): the GPUs are "
                "counted, not the shares",
                where=facts.name,
                hint="a request for several shares may get the same GPU; switch sharing off for training nodes",
            )
        )
        return physical, physical
    total = built if built is not None and built >= given else _count(facts.capacity.get(resource or "", 0))
    total = max(total, given)
    if slices:
        findings.append(
            warning(
                "mig-enabled",
                f"{facts.name} offers {slices} MIG slices beside {given} whole GPUs; the label gpu.count ({total}) "
                "counts physical GPUs and ignores MIG",
                where=facts.name,
                hint="only whole GPUs are counted",
            )
        )
    if given < total:
        findings.append(
            warning(
                "gpus-not-allocatable",
                f"{given} of {total} GPUs of {facts.name} can be given to a job",
                where=facts.name,
                hint="check the device plugin's health reports and MIG configuration for the others",
            )
        )
    return total, given


def _count(number: float) -> int:
    return int(min(max(number, 0.0), MAX_COUNT))


def _host_memory(facts: _Facts, findings: list[Finding]) -> int | None:
    capacity, given = facts.capacity.get("memory"), facts.allocatable.get("memory")
    if capacity and given and given > capacity * (1 + _MOST_TOLERANCE / 2):
        findings.append(
            note(
                "memory-contradicts",
                f"{facts.name} can give more memory ({gib(given)}) than it has ({gib(capacity)}); the smaller is taken",
                where=facts.name,
            )
        )
    sizes = [size for size in (capacity, given) if size]
    return int(min(*sizes, 1e18) / MIB) or None if sizes else None


def _cores(facts: _Facts, findings: list[Finding]) -> int | None:
    """Physical cores: Kubernetes counts hardware threads."""
    threads = _count(facts.capacity.get("cpu", facts.allocatable.get("cpu", 0.0)))
    if not threads:
        return None
    label = facts.labels.get(_SMT)
    arm = facts.labels.get("kubernetes.io/arch", "amd64").startswith("arm")
    doubled = label == "true" if label in ("true", "false") else not arm
    if doubled and label is None and not any(finding.id == "threads-assumed" for finding in findings):
        findings.append(note("threads-assumed", "two hardware threads a core are assumed: Kubernetes counts threads"))
    return max(1, threads // 2) if doubled else threads


def _schedulable(facts: _Facts, findings: list[Finding]) -> bool:
    if facts.ready and not facts.cordoned:
        return True
    state = "not ready" if not facts.ready else "cordoned"
    findings.append(
        warning(
            "node-unusable",
            f"{facts.name} is {state}: no pod starts there, so it is not counted",
            where=facts.name,
            hint=f"kubectl {'describe node' if not facts.ready else 'uncordon'} {facts.name}",
        )
    )
    return False
