"""The TrainJob recommender as kubectl's filter: what it prints is a job that Kubeflow takes, or nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.clients.stand_in import Behaviour
from tests.parsers.kubeflow_rules import operator_refusals, schema_refusals, transcribed

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "kubernetes" / "trainjob_recommender.py"
JOB: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {
        "name": "my-run",
        "namespace": "team",
        "uid": "0d5f",
        "resourceVersion": "7",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {
            "planner/model": "llama3-8b",
            "planner/gpu": "h100",
            "planner/gpus": "16",
            "planner/backend": "fsdp",
            "kubectl.kubernetes.io/last-applied-configuration": "{}",
            "team/note": "x",
        },
    },
    "spec": {
        "runtimeRef": {"name": "torch-distributed"},
        "suspend": True,
        "trainer": {
            "image": "registry.local/train:1",
            "env": [{"name": "TRAIN_SCRIPT", "value": "/app/train.py"}],
            "resourcesPerNode": {"limits": {"rdma/hca": 1, "nvidia.com/gpu": 1}},
        },
    },
    "status": {"conditions": []},
}


def changed(annotations: dict[str, str | None] | None = None, **trainer: Any) -> dict[str, Any]:
    """The job with other annotations (None takes one away) and other fields of its trainer."""
    job: dict[str, Any] = json.loads(json.dumps(JOB))
    for name, value in (annotations or {}).items():
        job["metadata"]["annotations"][name] = value
        if value is None:
            del job["metadata"]["annotations"][name]
    for name, value in trainer.items():
        job["spec"]["trainer"][name] = value
        if value is None:
            del job["spec"]["trainer"][name]
    return job


@dataclass(frozen=True)
class Done:
    """How the example ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@cache
def example() -> ModuleType:
    """The example as a module: starting an interpreter for every case takes minutes."""
    spec = importlib.util.spec_from_file_location("trainjob_recommender", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filtered(url: str, text: str, *words: str) -> Done:
    """What the example makes of a text on its standard input."""
    out, err, stdin = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(text)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = example().main(["--server", url, *words])
    finally:
        sys.stdin = stdin
    return Done(code, out.getvalue(), err.getvalue())


def taken(done: Done) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(ConfigMap, TrainJob) of an answer that Kubeflow's schema and operator accept."""
    assert done.returncode == 0, done.stderr
    *maps, job = list(yaml.safe_load_all(done.stdout))
    assert schema_refusals(job, transcribed("TrainJob")) == []
    assert [part for part in operator_refusals(job) if "/dev/shm" not in part] == []
    return (maps[0] if maps else None), job


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_job_is_completed(service_url: str, form: str) -> None:
    """Size, resources, command, files and verdict are the plan's; what is the user's stays."""
    text = yaml.safe_dump(JOB) if form == "yaml" else json.dumps(JOB)
    config_map, job = taken(filtered(service_url, text))
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["image"] == "registry.local/train:1"
    assert trainer["resourcesPerNode"]["limits"]["rdma/hca"] == 1
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    assert job["spec"]["suspend"] is True
    metadata = job["metadata"]
    assert set(metadata) == {"name", "namespace", "annotations"}
    assert metadata["annotations"]["team/note"] == "x"
    assert len(metadata["annotations"]["planner/plan-id"]) == 64
    assert metadata["annotations"]["planner/verdict"].startswith("fits: fsdp: ")
    assert not any("last-applied" in name for name in metadata["annotations"])
    assert config_map is not None
    assert config_map["metadata"]["namespace"] == "team"
    assert config_map["data"]["launch.sh"].startswith("#!")
    volumes = json.dumps(job["spec"]["runtimePatches"])
    assert config_map["metadata"]["name"] in volumes
    assert "replace-me" not in json.dumps([config_map["metadata"], job])
    variables = {item["name"]: item.get("value") for item in trainer["env"]}
    assert variables["PLANNER_PLAN_ID"] == metadata["annotations"]["planner/plan-id"]
    assert variables["TRAIN_SCRIPT"] == "/app/train.py"


def test_the_filter_may_run_twice(service_url: str) -> None:
    """Its own output gives the same job, with or without the ConfigMap; other patches stay."""
    job = changed()
    job["spec"]["runtimePatches"] = [{"manager": "team.local/labels"}]
    first = filtered(service_url, yaml.safe_dump(job))
    config_map, made = taken(first)
    for text in (first.stdout, yaml.safe_dump(made)):
        assert taken(filtered(service_url, text)) == (config_map, made)
    assert [patch["manager"] for patch in made["spec"]["runtimePatches"]] == [
        "team.local/labels",
        "parallel-planner.local/files",
    ]


@pytest.mark.parametrize(
    "change",
    [{"planner/gpus": "32"}, {"planner/backend": "pytorch"}],
    ids=["size", "backend"],
)
@pytest.mark.parametrize("command", [None, ["bash", "/plan/launch.sh", "--more"]], ids=["planned", "own"])
def test_after_a_change(service_url: str, change: dict[str, str], command: list[str] | None) -> None:
    """Files, mounts, sizes and variables are those of the new plan together, also under a command of one's own."""
    _, first = taken(filtered(service_url, yaml.safe_dump(JOB)))
    first["metadata"]["annotations"] |= change
    first["spec"]["trainer"]["command"] = command or first["spec"]["trainer"]["command"]
    text = yaml.safe_dump(first)
    done = filtered(service_url, text)
    config_map, second = taken(done)
    assert ("keeps its own command" in done.stderr) == (command is not None)
    assert second["spec"]["trainer"]["command"] == first["spec"]["trainer"]["command"]
    plan_id = second["metadata"]["annotations"]["planner/plan-id"]
    assert plan_id != first["metadata"]["annotations"]["planner/plan-id"]
    assert config_map is not None
    assert config_map["metadata"]["name"] == f"plan-{plan_id[:12]}-files"
    assert set(re.findall(r"plan-[0-9a-f]{12}-files", json.dumps(second))) == {config_map["metadata"]["name"]}
    variables = {item["name"]: item.get("value") for item in second["spec"]["trainer"]["env"]}
    assert (variables["PLANNER_PLAN_ID"], variables["PLANNER_BACKEND"]) == (
        plan_id,
        change.get("planner/backend", "fsdp"),
    )
    # Where only sizes are asked for, the files that stay are told to be another plan's.
    sizes = filtered(service_url, text, "--sizes-only")
    assert taken(sizes)[0] is None
    assert "files of another plan" in sizes.stderr


@pytest.mark.parametrize("how", ["command", "args", "option"])
def test_a_command_of_its_own_stays(service_url: str, how: str) -> None:
    """Such a job is sized, told the degrees in variables, and gets neither files nor mounts."""
    job = changed({"planner/model": "llama3-8b"}, env=None, **({} if how == "option" else {how: ["train", "--x"]}))
    config_map, made = taken(filtered(service_url, json.dumps(job), *(["--sizes-only"] if how == "option" else [])))
    assert config_map is None
    assert "runtimePatches" not in made["spec"]
    assert made["spec"]["trainer"].get(how) == job["spec"]["trainer"].get(how)
    assert {"PLANNER_TP", "PLANNER_DP"} <= {item["name"] for item in made["spec"]["trainer"]["env"]}


def test_the_job_s_own_size_counts(service_url: str) -> None:
    """Without gpus and nodes in the annotations the job's nodes and GPUs are the machines."""
    for part in ("limits", "requests"):
        job = changed({"planner/gpus": None}, numNodes=4, resourcesPerNode={part: {"nvidia.com/gpu": 4}})
        _, made = taken(filtered(service_url, json.dumps(job)))
        assert (made["spec"]["trainer"]["numNodes"], made["spec"]["trainer"]["numProcPerNode"]) == (4, 4)


@pytest.mark.parametrize(
    ("limit", "stays"), [("4", False), (4, False), ("8000m", False), ("1k", False), ("512", True), (512, True)]
)
def test_no_request_above_its_limit(service_url: str, limit: str | int, stays: bool) -> None:
    """Memory and GPUs are the plan's in both; a limit of the cores below the plan's request goes, and is told."""
    limits = {"cpu": limit, "memory": "1Gi", "nvidia.com/gpu": 8}
    done = filtered(service_url, json.dumps(changed(resourcesPerNode={"limits": limits})))
    found = taken(done)[1]["spec"]["trainer"]["resourcesPerNode"]
    assert ("cpu" in found["limits"]) == stays
    assert (f"the limit of {limit} cores is left out" in done.stderr) == (not stays)
    assert {name: found["limits"][name] for name in ("memory", "nvidia.com/gpu")} == {
        name: found["requests"][name] for name in ("memory", "nvidia.com/gpu")
    }


def test_data_is_mounted_from_a_claim(service_url: str) -> None:
    """`planner/claim` names the volume of the data."""
    _, made = taken(filtered(service_url, json.dumps(changed({"planner/claim": "datasets"}))))
    assert '"claimName": "datasets"' in json.dumps(made)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 2, "not a TrainJob"),
        ("a: [", 2, "neither YAML nor JSON"),
        ("- 1", 2, "not a TrainJob"),
        (json.dumps({**JOB, "kind": "PyTorchJob"}), 2, "not a TrainJob"),
        (f"{json.dumps(JOB)}\n---\n{json.dumps(JOB)}", 2, "2 documents"),
        (f"{json.dumps(JOB)}\n---\n{{kind: ConfigMap, metadata: {{name: mine}}}}", 2, "2 documents"),
        (json.dumps({**JOB, "apiVersion": "v1"}), 2, "not a TrainJob"),
        (json.dumps({**JOB, "spec": None}), 2, "no spec"),
        (json.dumps({**JOB, "spec": {"trainer": {}}}), 2, "names no runtime"),
        (json.dumps({**JOB, "spec": {"runtimeRef": {"name": ""}}}), 2, "names no runtime"),
        (json.dumps(changed(resourcesPerNode={"requests": {"nvidia.com/mig-1g.10gb": 1}})), 2, "for whole GPUs"),
        (json.dumps(changed({"planner/model": None})), 2, "names the model"),
        (json.dumps(changed({"planner/gpu": None})), 2, "names the accelerator"),
        (json.dumps(changed({"planner/gpus": None})), 2, "how many GPUs"),
        (json.dumps(changed({"planner/gpus": "many"})), 2, "whole number"),
        (json.dumps(changed({"planner/colour": "red"})), 2, "no such annotation"),
        (json.dumps(changed({"planner/pins": "tp"})), 2, "name=value"),
        (json.dumps(changed({"planner/pins": "colour=2"})), 2, "colour"),
        (json.dumps(changed({"planner/model": "no-such-model"})), 2, "no-such-model"),
        (json.dumps(changed({"planner/gpus": "12"})), 2, "whole nodes"),
        (json.dumps(changed({"planner/backend": "megatron"})), 2, "MEGATRON_PATH"),
        (json.dumps(changed({"planner/model": "405b", "planner/gpus": "8"})), 3, "no strategy"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else None,
)
def test_what_is_refused(service_url: str, text: str, code: int, says: str) -> None:
    """Nothing on standard output, the reason on standard error, and the exit code of the planner."""
    done = filtered(service_url, text)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every value inside a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*place, key)
        yield from places(item, (*place, key))


@pytest.mark.parametrize("odd", [None, 7, [1], {"a": {}}], ids=str)
def test_parts_of_another_shape(service_url: str, odd: Any) -> None:
    """Whatever stands where something else is expected, the end is a job or an error, never a traceback."""
    job = changed({"planner/seq-len": "8192"}, numNodes=2)
    job["spec"]["runtimePatches"] = [{"manager": "team.local/labels"}]
    for place in places(job):
        broken: Any = json.loads(json.dumps(job))
        parent = broken
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = odd
        done = filtered(service_url, json.dumps(broken))
        assert done.returncode in (0, 2), (place, done.stderr)
        assert (done.stdout == "") == (done.returncode != 0)


def test_without_the_service(stand_in: str, behaviour: Behaviour, tmp_path: Path) -> None:
    """A service that fails or a file that is not there is an error without output."""
    behaviour.answer = (500, {}, b"")
    done = filtered(stand_in, json.dumps(JOB))
    assert (done.returncode, done.stdout) == (1, "")
    done = filtered(stand_in, "", str(tmp_path / "absent.yaml"))
    assert (done.returncode, done.stdout) == (2, "")


def test_the_manifest_of_the_guide(service_url: str) -> None:
    """The TrainJob that README.md shows is completed."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", EXAMPLE.with_name("README.md").read_text(), re.MULTILINE | re.DOTALL)
    config_map, job = taken(filtered(service_url, text))
    assert config_map is not None
    assert job["spec"]["trainer"]["numNodes"] == 2


def test_in_a_pipe(service_url: str) -> None:
    """As a program of its own: the address from the environment, one text in, one text out."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        input=yaml.safe_dump(JOB),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PLANNER_URL": service_url},
    )
    taken(Done(done.returncode, done.stdout, done.stderr))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_reads_the_output(service_url: str, tmp_path: Path) -> None:
    """kubectl itself parses both documents (its kustomize needs no cluster)."""
    (tmp_path / "job.yaml").write_text(filtered(service_url, json.dumps(JOB)).stdout, encoding="utf-8")
    (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\n", encoding="utf-8")
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {part["kind"] for part in yaml.safe_load_all(done.stdout)} == {"ConfigMap", "TrainJob"}
