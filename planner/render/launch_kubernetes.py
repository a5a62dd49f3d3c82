"""Kubernetes: the files of a plan as a ConfigMap, and a job of Kubeflow's operators that mounts it.

TrainJob of Kubeflow Trainer v2 (``trainer.kubeflow.org/v1alpha1``, read at git 8c0f505) and PyTorchJob of the training
operator v1 (``kubeflow.org/v1``, release 1.9).  Both operators number the pods and name the leading one in ``PET_*``
variables; ``launch.sh`` is given exactly these.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from planner.render.engine import fill
from planner.render.launch import (
    RENDEZVOUS_PORT,
    Launch,
    LauncherFiles,
    Start,
    cores,
    host_memory_gib,
    job_name,
    needed_variables,
)
from planner.render.text import one_line
from planner.specs.cluster import Cluster
from planner.specs.plan import Plan, PlanDocument
from planner.units import GIB

TRAINJOB_FILE = "trainjob.yaml"
PYTORCHJOB_FILE = "pytorchjob.yaml"
KUSTOMIZATION_FILE = "kustomization.yaml"

ALLOCATABLE_PERCENT = 90
"""Share of a node's cores and memory that a pod may ask for: kubelet, system and daemon sets keep the rest, and a pod
that asks for all of it is never scheduled (Kubernetes, "Reserve Compute Resources for System Daemons")."""

_SHARED_MEMORY_SHARE = 8
"""One part in so many of the pod's memory for /dev/shm: NCCL and data loaders use it; Docker's default is 64 MiB."""

IMAGE = "registry.example.com/replace-me:latest"
CLAIM = "replace-me"
MISSING_PATH = "/replace-me"

_GPU_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Names under which the vendors' device plugins offer GPUs."""


def kubernetes_command(file: str) -> str:
    """The shell command that starts the job of a manifest."""
    return f"kubectl apply -k . && kubectl create -f {file}"


def quoted(value: str) -> str:
    """A YAML scalar that is read back as this very string: JSON's strings are YAML's double-quoted ones."""
    return json.dumps(value)


def kubernetes_files(
    document: PlanDocument, launch: Launch, optional: Sequence[str], names: Collection[str], kind: str
) -> LauncherFiles:
    """The manifest of one ``kind`` (trainjob or pytorchjob) and the ConfigMap of the files called ``names``."""
    file = TRAINJOB_FILE if kind == "trainjob" else PYTORCHJOB_FILE
    context = _context(document, launch, sorted(names))
    return LauncherFiles(
        {
            KUSTOMIZATION_FILE: fill("launch/kustomization.yaml.j2", context),
            file: fill(f"launch/{file}.j2", context),
        },
        {
            KUSTOMIZATION_FILE: "the ConfigMap that carries the other files into the pods",
            file: "a TrainJob (Kubeflow Trainer v2)" if kind == "trainjob" else "a PyTorchJob (Kubeflow v1)",
        },
        _start(document, launch, optional, kind, file, listed=_in_folders(sorted(names))),
    )


def _context(document: PlanDocument, launch: Launch, names: list[str]) -> dict[str, Any]:
    cluster, name = document.request.cluster, job_name(document)
    memory = memory_request_gib(cluster, document.best)
    return {
        "title": one_line(document.request.model.name),
        "name": quoted(name),
        "config_map": quoted(f"{name}-files"),
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.local_gpus,
        "processes_text": quoted(str(cluster.local_gpus)),
        # Processes on cores ask for no GPUs: such a pod would wait for ever.
        "gpu_resource": ""
        if cluster.accelerator.synchronous
        else _GPU_RESOURCES.get(cluster.accelerator.vendor.lower(), "nvidia.com/gpu"),
        "cpu": quoted(str(max(1, cores(cluster) * ALLOCATABLE_PERCENT // 100))),
        "memory": quoted(f"{memory}Gi"),
        "shared_memory": quoted(f"{max(1, memory // _SHARED_MEMORY_SHARE)}Gi"),
        "port": RENDEZVOUS_PORT,
        "image": quoted(IMAGE),
        "claim": quoted(CLAIM),
        "needed": [
            {"name": quoted(variable.name), "value": quoted(MISSING_PATH), "why": variable.why}
            for variable in needed_variables(launch)
        ],
        "entries": [(quoted(key) if key == path else quoted(f"{key}={path}")) for key, path in _keys(names)],
        "items": [(quoted(key), quoted(path)) for key, path in _keys(names)] if _in_folders(names) else [],
    }


def memory_request_gib(cluster: Cluster, plan: Plan) -> int:
    """What a pod asks for: what kubelet leaves, and no less than the plan keeps in host memory."""
    needed = -(-int(plan.estimate.host_memory_bytes_per_node) // GIB)
    return max(1, host_memory_gib(cluster) * ALLOCATABLE_PERCENT // 100, needed)


def _keys(names: list[str]) -> list[tuple[str, str]]:
    """(key of the ConfigMap, path of the file): a key cannot hold a slash, the volume puts the file into its folder."""
    return [(path.replace("/", "__"), path) for path in names]


def _in_folders(names: list[str]) -> bool:
    return any("/" in name for name in names)


def _start(
    document: PlanDocument, launch: Launch, optional: Sequence[str], kind: str, file: str, *, listed: bool
) -> Start:
    name, last = job_name(document), document.request.cluster.nodes - 1
    before = [
        f"Replace the image `{IMAGE}` and the volume claim `{CLAIM}` in `{file}`"
        + "".join(f", and set `{variable.name}`" for variable in needed_variables(launch))
        + ".",
        f"The files reach the pods in the ConfigMap `{name}-files`, mounted at `/plan`: after an edit apply it again. "
        "A training script can lie in the image or on the volume, or beside `launch.sh` if you add it to "
        f"`{KUSTOMIZATION_FILE}`" + (f" and to the volume's `items` in `{file}`." if listed else "."),
        f"A second run needs `kubectl delete -f {file}` first: the job of the first one keeps its name.",
        "The operator numbers the pods, so the rank map holds for pods; on which machine a pod lands is the "
        "scheduler's choice (Kueue's topology-aware scheduling can keep neighbours close).",
    ]
    if optional:
        names = ", ".join(f"`{variable}`" for variable in optional)
        before.append(f"Pods see none of your variables: add {names} to `env`, too, where you set them.")
    if kind == "trainjob":
        title, selector = "With Kubeflow Trainer v2", f"jobset.sigs.k8s.io/jobset-name={name}"
        pods = f"kubectl logs -f -l {selector},batch.kubernetes.io/job-completion-index={last}"
    else:
        title, selector = "With Kubeflow's training operator v1", f"training.kubeflow.org/job-name={name}"
        replica = f"worker,training.kubeflow.org/replica-index={last - 1}" if last else "master"
        pods = f"kubectl logs -f -l {selector},training.kubeflow.org/replica-type={replica}"
    log = (
        f"`{pods}` follows the last node (where pipeline frameworks print the loss); `kubectl get pods -l {selector}` "
        "must show every pod Running, and `kubectl describe` of one that is Pending says why."
    )
    return Start(title, kubernetes_command(file), tuple(before), log)
