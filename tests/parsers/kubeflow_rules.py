"""What Kubeflow's API server and operators refuse in a manifest: strict schemas, and the rules their webhooks add.

The schemas are our transcription in tests/data/crd, or the published definitions of a folder.  The rules restate
kubeflow/trainer git 8c0f505 (``plugins/torch/torch.go``, ``plugins/jobset/jobset.go``) and training-operator
release-1.9 (``pkg/webhooks/pytorch/pytorchjob_webhook.go``), and what neither can see: GPUs of a pod against processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

TRANSCRIBED = Path(__file__).parent.parent / "data" / "crd"
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN_PATH = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9._~!$&'()*+,;=:@/%-]+")


def transcribed(kind: str) -> dict[str, Any]:
    """Our schema of a kind (TrainJob or PyTorchJob)."""
    schema: dict[str, Any] = yaml.safe_load((TRANSCRIBED / f"{kind.lower()}.yaml").read_text(encoding="utf-8"))
    return schema


def published(folder: Path, kind: str, version: str) -> dict[str, Any]:
    """The definition of a kind in a folder of custom resource definitions, made strict."""
    for path in sorted(folder.rglob("*.yaml")):
        for definition in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if not definition or definition.get("kind") != "CustomResourceDefinition":
                continue
            spec = definition["spec"]
            for entry in spec["versions"]:
                if (spec["names"]["kind"], f"{spec['group']}/{entry['name']}") == (kind, version):
                    found: dict[str, Any] = strict(entry["schema"]["openAPIV3Schema"])
                    found["properties"]["metadata"] = {"type": "object"}
                    return found
    raise LookupError(f"{folder} defines no {kind} of {version}")


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused and numbers' format notes left out."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": schema.get("pattern", "")}]}
    made = {key: value for key, value in schema.items() if key != "format"}
    if "properties" in made:
        made["properties"] = {name: strict(value) for name, value in made["properties"].items()}
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif "additionalProperties" in made:
        made["additionalProperties"] = strict(made["additionalProperties"])
    if "items" in made:
        made["items"] = strict(made["items"])
    # The one rule on a plan's fields that does not compare with an older object.
    if any(rule["rule"] == "self >= 1" for rule in made.get("x-kubernetes-validations", ())):
        made["minimum"] = 1
    return made


def schema_refusals(manifest: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What the schema refuses: path and message."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


def operator_refusals(manifest: dict[str, Any]) -> list[str]:
    """What the operator's webhook refuses, and a pod whose GPUs are not one a process."""
    name = manifest.get("metadata", {}).get("name", "")
    found = [] if _LABEL.fullmatch(name) else [f"metadata/name: {name!r} is no DNS label"]
    rules = _trainjob if manifest["kind"] == "TrainJob" else _pytorchjob
    return [*found, *rules(manifest["spec"])]


def _trainjob(spec: dict[str, Any]) -> Iterator[str]:
    trainer = spec.get("trainer", {})
    for variable in trainer.get("env", ()):
        if variable["name"].startswith("PET_"):
            yield f"trainer/env: {variable['name']} is the operator's"
    if trainer.get("numProcPerNode") != gpus(trainer.get("resourcesPerNode", {})):
        yield "trainer: processes and GPUs of a node differ"
    for patch in spec.get("runtimePatches", ()):
        if not _DOMAIN_PATH.fullmatch(patch["manager"]):
            yield f"runtimePatches/manager: {patch['manager']!r} is no path with a domain"
        template = patch.get("trainingRuntimeSpec", {}).get("template", {})
        for job in template.get("spec", {}).get("replicatedJobs", ()):
            yield from _patched_job(job)


def _patched_job(job: dict[str, Any]) -> Iterator[str]:
    """The runtime torch-distributed has one job called node with one container called node."""
    if job["name"] != "node":
        yield f"runtimePatches: the runtime has no job {job['name']!r}"
    pod = job["template"]["spec"]["template"]["spec"]
    for container in pod.get("containers", ()):
        if container["name"] != "node":
            yield f"runtimePatches: the runtime has no container {container['name']!r}"
        if container.get("env"):
            yield "runtimePatches: variables of the node container belong into trainer/env"
        yield from _mounts(container, pod)


def _pytorchjob(spec: dict[str, Any]) -> Iterator[str]:
    for role, replica in spec["pytorchReplicaSpecs"].items():
        if role not in ("Master", "Worker"):
            yield f"{role}: only Master and Worker exist"
        if replica.get("replicas", 1) < 1 or (role == "Master" and replica.get("replicas") != 1):
            yield f"{role}: {replica.get('replicas')} replicas"
        pod = replica["template"]["spec"]
        containers = {container["name"]: container for container in pod["containers"]}
        if any(not container.get("image") for container in containers.values()):
            yield f"{role}: a container needs an image"
        if "pytorch" not in containers:
            yield f"{role}: no container is called pytorch"
            continue
        if str(gpus(containers["pytorch"].get("resources", {}))) != spec.get("nprocPerNode"):
            yield f"{role}: processes and GPUs of a node differ"
        yield from _mounts(containers["pytorch"], pod)


def _mounts(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    mounts = container.get("volumeMounts", ())
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"volumeMounts: no volume is called {mount['name']!r}"
    if not any(mount["mountPath"] == "/dev/shm" for mount in mounts):
        yield "volumeMounts: /dev/shm is 64 MiB"


def gpus(resources: dict[str, Any]) -> int:
    """GPUs of a pod's limits; what is asked for must equal them, for GPUs cannot be overcommitted."""
    limits = {name: int(value) for name, value in resources.get("limits", {}).items() if name.endswith("/gpu")}
    asked = {name: int(value) for name, value in resources.get("requests", {}).items() if name.endswith("/gpu")}
    return sum(limits.values()) if asked in ({}, limits) else -1
