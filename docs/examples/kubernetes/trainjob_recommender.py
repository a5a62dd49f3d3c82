#!/usr/bin/env python3
"""Sizes a TrainJob (Kubeflow Trainer v2) by the planner's answer to its annotations; a filter for kubectl.

    kubectl get trainjob llama -o yaml | python trainjob_recommender.py | kubectl apply -f -

What is trained stands in annotations (``planner/model: 70b``, ``planner/gpu: h100``, ``planner/gpus: "128"`` ...); the
job gets nodes, processes, resources and, where it has no command of its own, the plan's launch files and the patch that
mounts them.  What it printed it takes again, after a change of the annotations.  Nothing is printed unless everything
worked, so that kubectl applies all or nothing.
Exit codes: 2 the job or its annotations cannot be used, 3 no plan fits, 1 the service cannot be asked.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from planner.errors import InputError, PlannerError
from planner.service.words import strategy_text
from planner.specs.plan import PlanDocument
from planner.units import duration, gib
from planner_api.clients.rest import PlannerClient

GROUP = "trainer.kubeflow.org"
PREFIX = "planner/"
WORDS_OF_CLUSTER = ("gpu", "system")
NUMBERS_OF_CLUSTER = ("gpus", "nodes", "gpus-per-node", "nics-per-node")
WORDS_OF_JOB = ("precision", "objective", "global-batch")
KNOWN = ("model", *WORDS_OF_CLUSTER, *NUMBERS_OF_CLUSTER, "seq-len", *WORDS_OF_JOB, "backend", "pins", "claim")
ANSWERS = ("plan-id", "verdict")
KEPT_OF_METADATA = ("name", "generateName", "namespace", "labels")
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
PARTS_OF_GPUS = re.compile(r"/(mig-|gpu\.|gpu-)")
"""``nvidia.com/mig-1g.10gb``, and GPUs that several pods share."""
FILES_OF_A_PLAN = re.compile(r"plan-[0-9a-f]{12}-files")
MANAGER = "parallel-planner.local/files"
DATA_VOLUME = "data"
PLACEHOLDER = "/replace-me"
MAX_CONFIG_MAP_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB, names included."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Patch a TrainJob with the nodes, processes and files of a plan.")
    parser.add_argument("file", nargs="?", default="-", help="the TrainJob, YAML or JSON; - is standard input")
    parser.add_argument("--server", help="address of the service (default: PLANNER_URL; token: PLANNER_TOKEN)")
    parser.add_argument("--sizes-only", action="store_true", help="leave command and mounts as they are")
    options = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
        job, given_files = read_job(text)
        with PlannerClient(options.server) as client:
            document = client.suggest(question(job))
            files = client.artifacts(document.id, "trainjob")
        config_map, made, notes = recommended(job, document, files, sizes_only=options.sizes_only)
    except PlannerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except (OSError, UnicodeDecodeError) as problem:
        sys.stderr.write(f"error: the TrainJob cannot be read: {problem}\n")
        return InputError.exit_code
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    yaml.safe_dump_all([*(given_files if config_map is None else [config_map]), made], sys.stdout, sort_keys=False)
    return 0


def read_job(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The one TrainJob of a text, and the files of a plan that were printed with it; InputError for anything else."""
    try:
        found = [part for part in yaml.safe_load_all(text) if part is not None]
    except (yaml.YAMLError, RecursionError) as problem:
        raise InputError(f"this is neither YAML nor JSON: {' '.join(str(problem).split())[:200]}") from problem
    given_files = [part for part in found if is_files(part)]
    others = [part for part in found if not is_files(part)]
    job = others[0] if len(others) == 1 and isinstance(others[0], dict) else {}
    version = str(job.get("apiVersion"))
    spec, metadata = job.get("spec"), job.get("metadata")
    if job.get("kind") != "TrainJob" or not version.startswith(f"{GROUP}/"):
        raise InputError(
            "this is not a TrainJob",
            got=f"{len(others)} documents" if len(others) != 1 else f"{version} {job.get('kind')}",
            allowed=f"one TrainJob of {GROUP}/v1alpha1, and the ConfigMap of its plan's files",
            hint="for example: kubectl get trainjob NAME -o yaml",
        )
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        raise InputError("the TrainJob has no metadata or no spec", hint="see `kubectl explain trainjob`")
    runtime = spec.get("runtimeRef")
    if not isinstance(runtime, dict) or not isinstance(runtime.get("name"), str) or not runtime["name"]:
        raise InputError(
            "the TrainJob names no runtime",
            where="spec.runtimeRef",
            allowed="a mapping with the name of a ClusterTrainingRuntime or TrainingRuntime",
            hint="for example runtimeRef: {name: torch-distributed}; `kubectl get clustertrainingruntimes` lists them",
        )
    check_shapes(job)
    return job, given_files


def is_files(part: Any) -> bool:
    """Whether a document is the ConfigMap that this program prints."""
    metadata = part.get("metadata") if isinstance(part, dict) and part.get("kind") == "ConfigMap" else None
    return isinstance(metadata, dict) and FILES_OF_A_PLAN.fullmatch(str(metadata.get("name"))) is not None


def check_shapes(job: dict[str, Any]) -> None:
    """Refuse a job whose parts that are read here are of another shape than the API's."""
    mapping, listed = (dict, type(None)), (list, type(None))
    trainer = job["spec"].get("trainer")
    resources = trainer.get("resourcesPerNode") if isinstance(trainer, dict) else None
    parts: dict[str, tuple[Any, tuple[type, ...]]] = {
        "metadata.annotations": (job["metadata"].get("annotations"), mapping),
        "spec.trainer": (trainer, mapping),
        "spec.trainer.resourcesPerNode": (resources, mapping),
        "spec.runtimePatches": (job["spec"].get("runtimePatches"), listed),
    }
    if isinstance(trainer, dict):
        parts["spec.trainer.env"] = (trainer.get("env"), listed)
    if isinstance(resources, dict):
        parts |= {
            f"spec.trainer.resourcesPerNode.{name}": (resources.get(name), mapping) for name in ("limits", "requests")
        }
    for where, (value, allowed) in parts.items():
        items = value if isinstance(value, list) else []
        names = value if isinstance(value, dict) else {}
        fine = isinstance(value, allowed) and all(
            isinstance(item, dict) and isinstance(item.get("name", ""), str) for item in items
        )
        if not fine or not all(isinstance(name, str) for name in names):
            raise InputError("this part of the TrainJob has another shape", where=where, hint="see `kubectl explain`")
        slices = [name for name in names if PARTS_OF_GPUS.search(name)]
        if slices:
            raise InputError(
                "a plan is for whole GPUs, not for parts of them",
                where=where,
                got=slices[0],
                hint="take it out of the job",
            )


def asked_of(job: dict[str, Any]) -> dict[str, str]:
    """The planner's annotations without their prefix; unknown ones are refused, for they would have no effect."""
    given = job["metadata"].get("annotations") or {}
    found = {str(key).removeprefix(PREFIX): value for key, value in given.items() if str(key).startswith(PREFIX)}
    for name, value in found.items():
        if name not in KNOWN and name not in ANSWERS:
            raise InputError(
                "the planner has no such annotation",
                where=f"metadata.annotations: {PREFIX}{name}",
                allowed=", ".join(KNOWN),
            )
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 1000:
            raise InputError(
                "this annotation is no text", where=f"metadata.annotations: {PREFIX}{name}", hint="put it into quotes"
            )
    return {name: value.strip() for name, value in found.items() if name in KNOWN}


def question(job: dict[str, Any]) -> dict[str, Any]:
    """The body of ``POST /v1/plans`` that the annotations mean; the job's own size counts where they name none."""
    asked = asked_of(job)
    if "model" not in asked:
        raise InputError(
            "the annotation that names the model is missing",
            where=f"metadata.annotations: {PREFIX}model",
            hint=f"kubectl annotate trainjob NAME {PREFIX}model=70b {PREFIX}gpu=h100 {PREFIX}gpus=128",
        )
    cluster: dict[str, Any] = {name: asked[name] for name in WORDS_OF_CLUSTER if name in asked}
    for name in NUMBERS_OF_CLUSTER:
        if name in asked:
            cluster[name.replace("-", "_")] = whole(asked[name], name)
    if not {"gpu", "system"} & set(cluster):
        raise InputError(
            "the annotation that names the accelerator is missing", where=f"metadata.annotations: {PREFIX}gpu"
        )
    if not {"gpus", "nodes"} & set(cluster):
        cluster |= own_size(job)
    training: dict[str, Any] = {name.replace("-", "_"): asked[name] for name in WORDS_OF_JOB if name in asked}
    if training.get("global_batch", "").isdigit():
        training["global_batch"] = whole(asked["global-batch"], "global-batch")
    if "seq-len" in asked:
        training["seq_len"] = whole(asked["seq-len"], "seq-len")
    return {
        "model": asked["model"],
        "cluster": cluster,
        "job": training,
        "backend": asked.get("backend", "auto"),
        "pins": pins(asked.get("pins", "")),
        "top": 1,
    }


def whole(text: str, name: str) -> int:
    """A whole number of an annotation."""
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) == 0:
        raise InputError(
            "this is no whole number above 0", where=f"metadata.annotations: {PREFIX}{name}", got=repr(text[:60])
        )
    return int(text)


def pins(text: str) -> dict[str, int | str]:
    """``tp=8,recompute=full`` as a mapping; the service knows which pins there are."""
    found: dict[str, int | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise InputError("a pin is name=value", where=f"metadata.annotations: {PREFIX}pins", got=repr(part[:60]))
        found[name.strip()] = int(value) if value.strip().isascii() and value.strip().isdigit() else value.strip()
    return found


def own_size(job: dict[str, Any]) -> dict[str, int]:
    """Nodes, and GPUs of a node, that the job already asks for."""
    trainer = job["spec"].get("trainer") or {}
    per_node = trainer.get("resourcesPerNode") or {}
    asked_for = {**(per_node.get("requests") or {}), **(per_node.get("limits") or {})}
    nodes = trainer.get("numNodes")
    if not isinstance(nodes, int) or nodes < 1:
        raise InputError(
            "neither the annotations nor the job say how many GPUs there are",
            where=f"metadata.annotations: {PREFIX}gpus",
            hint=f"annotate {PREFIX}gpus or {PREFIX}nodes, or set spec.trainer.numNodes",
        )
    gpus = [int(count) for name, count in asked_for.items() if name.endswith("/gpu") and str(count).isdigit()]
    return {"nodes": nodes, **({"gpus_per_node": gpus[0]} if gpus and gpus[0] else {})}


def recommended(
    job: dict[str, Any], document: PlanDocument, files: dict[str, str], *, sizes_only: bool
) -> tuple[dict[str, Any] | None, dict[str, Any], list[str]]:
    """(ConfigMap of the plan's files where the job mounts them, the TrainJob, notes)."""
    rendered = yaml.safe_load(files["trainjob.yaml"])["spec"]
    spec = dict(job["spec"])
    given = spec.get("trainer") or {}
    spec["trainer"] = trainer = sized(given, rendered["trainer"], document)
    patches = spec.get("runtimePatches") or []
    kept = [patch for patch in patches if patch.get("manager") != MANAGER]
    own = has_own_command(trainer, rendered["trainer"]["command"])
    config_map: dict[str, Any] | None = None
    notes = limits_left_out(given, trainer)
    if not sizes_only and (not own or len(kept) < len(patches)):
        require_variables(trainer["env"], rendered["trainer"].get("env") or [])
        config_map, patch = mounted(rendered, files, asked_of(job).get("claim"))
        spec["runtimePatches"] = [*kept, patch]
        if "namespace" in job["metadata"]:
            config_map["metadata"]["namespace"] = job["metadata"]["namespace"]
    elif len(kept) < len(patches) and document.id[:12] not in str(patches):
        notes.append("the job still mounts the files of another plan: without --sizes-only it gets those of this one")
    if not sizes_only and own:
        notes.append("the job keeps its own command: the plan's degrees are in its PLANNER_ variables")
    elif not sizes_only:
        trainer["command"] = rendered["trainer"]["command"]
    return config_map, renewed(job, document, spec), notes + [f"plan: {warning}" for warning in document.warnings]


def has_own_command(trainer: dict[str, Any], planned: list[str]) -> bool:
    """Whether a job starts something else than a plan's files, as this program itself may have written."""
    command = trainer.get("command")
    return command != planned if command else bool(trainer.get("args"))


def sized(given: dict[str, Any], rendered: dict[str, Any], document: PlanDocument) -> dict[str, Any]:
    """The trainer with the plan's nodes, processes, resources and variables."""
    return {
        **given,
        "numNodes": rendered["numNodes"],
        "numProcPerNode": rendered["numProcPerNode"],
        "resourcesPerNode": resources(given.get("resourcesPerNode") or {}, rendered),
        "env": environment(given.get("env") or [], document),
    }


def renewed(job: dict[str, Any], document: PlanDocument, spec: dict[str, Any]) -> dict[str, Any]:
    """The job as kubectl applies it: nothing that only the cluster writes, and the plan's id and verdict."""
    metadata = job["metadata"]
    return {
        "apiVersion": job["apiVersion"],
        "kind": "TrainJob",
        "metadata": {
            **{name: metadata[name] for name in KEPT_OF_METADATA if name in metadata},
            "annotations": {
                **{k: v for k, v in (metadata.get("annotations") or {}).items() if k != LAST_APPLIED},
                f"{PREFIX}plan-id": document.id,
                f"{PREFIX}verdict": verdict(document),
            },
        },
        "spec": spec,
    }


def verdict(document: PlanDocument) -> str:
    """The plan in a line."""
    estimate = document.best.estimate
    return (
        f"{'fits' if estimate.fits else 'DOES NOT FIT'}: {strategy_text(document.best)}; est. "
        f"{duration(estimate.step_time_s)} a step, {gib(estimate.peak_memory_bytes)} of "
        f"{gib(estimate.memory_limit_bytes)} a GPU"
    )


def resources(given: dict[str, Any], rendered: dict[str, Any]) -> dict[str, Any]:
    """What a pod asks for: the plan's GPUs, cores and memory; other resources (rdma/...) stay as they were, as does a
    limit of the cores that is not below them."""
    made = dict(given)
    for part, wanted in rendered["resourcesPerNode"].items():
        others = {k: v for k, v in (given.get(part) or {}).items() if not k.endswith("/gpu")}
        made[part] = {**others, **wanted}
    limits = made["limits"]
    if "cpu" in limits and cores(limits["cpu"]) < cores(made["requests"]["cpu"]):
        made["limits"] = {name: value for name, value in limits.items() if name != "cpu"}
    return made


def cores(quantity: Any) -> float:
    """Cores of "4", 4 or "4000m"; none where it is written in another way, so that it is no limit that stays."""
    text = str(quantity)
    number = text.removesuffix("m")
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", number):
        return 0.0
    return float(number) / (1000 if number != text else 1)


def limits_left_out(given: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """A note where a limit of the cores is gone."""
    before, after = (((part.get("resourcesPerNode") or {}).get("limits") or {}).get("cpu") for part in (given, made))
    if before is None or after is not None:
        return []
    wanted = made["resourcesPerNode"]["requests"]["cpu"]
    return [f"the limit of {before} cores is left out: a pod of the plan asks for {wanted}"]


def environment(given: list[dict[str, Any]], document: PlanDocument) -> list[dict[str, Any]]:
    """The job's variables, and those that tell a training script the plan."""
    strategy = document.best.strategy
    told = {
        "PLANNER_PLAN_ID": document.id,
        "PLANNER_BACKEND": document.best.backend,
        **{
            f"PLANNER_{name.upper()}": str(getattr(strategy, name))
            for name in ("tp", "cp", "pp", "ep", "dp", "zero_stage", "micro_batch")
        },
    }
    kept = [variable for variable in given if variable.get("name") not in told]
    return kept + [{"name": name, "value": value} for name, value in told.items()]


def require_variables(given: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Refuse a job whose launch script would not start; the files have placeholders for what only the user knows."""
    names = {variable.get("name") for variable in given}
    missing = [item["name"] for item in wanted if item.get("value") == PLACEHOLDER and item["name"] not in names]
    if missing:
        raise InputError(
            f"launch.sh needs {', '.join(missing)}",
            where="spec.trainer.env",
            hint="add them to the job, or use --sizes-only with a command of your own",
        )


def mounted(
    rendered: dict[str, Any], files: dict[str, str], claim: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ConfigMap of the plan's files, patch that mounts them); data is mounted from ``claim`` where one is named."""
    generator = yaml.safe_load(files["kustomization.yaml"])["configMapGenerator"][0]
    entries = (entry.rpartition("=") for entry in generator["files"])
    data = {key or path: files[path] for key, _, path in entries}
    if sum(len(text.encode()) for text in data.values()) > MAX_CONFIG_MAP_BYTES:
        raise InputError("the plan's files are too large for a ConfigMap", hint="put them into the image")
    patch = rendered["runtimePatches"][0]
    job = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    if claim is None:
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != DATA_VOLUME]
        for container in pod["containers"]:
            container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != DATA_VOLUME]
    else:
        for volume in pod["volumes"]:
            if volume["name"] == DATA_VOLUME:
                volume["persistentVolumeClaim"]["claimName"] = claim
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"]},
        "data": data,
    }
    return config_map, patch


if __name__ == "__main__":
    sys.exit(main())
