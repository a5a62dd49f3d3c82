"""Launchers accept what is rendered for them: shells, Kubeflow's schemas and models, kustomize, SkyPilot and Slurm.

Every check that needs a program or package skips with the reason where it is missing; PLANNER_PARSERS_PYTHON names an
interpreter with `pip install skypilot kubeflow-trainer-api`, PLANNER_KUBEFLOW_CRDS a folder of published definitions.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.catalog import load_accelerator
from planner.render import RENDERED_BACKENDS, render_plan, write_files
from planner.render.launch import Launch
from planner.render.launch_kubernetes import kubernetes_files
from planner.render.launch_skypilot import ACCELERATORS
from planner.specs.plan import PlanDocument
from tests.golden.plans import CASES
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import PYTHON, lacking, parser
from tests.parsers.kubeflow_rules import gpus, operator_refusals, published, schema_refusals, strict, transcribed
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, random_plans

pytestmark = pytest.mark.parsers

CRDS = os.environ.get("PLANNER_KUBEFLOW_CRDS", "")
HERE = Path(__file__).parent
LAUNCHERS = "slurm,trainjob,pytorchjob,skypilot,mpirun"
PLANS = 100
READ_BY = "published CRDs" if CRDS else "transcribed CRDs"
KINDS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "PyTorchJob": "kubeflow.org/v1"}

needs_crds = pytest.mark.skipif(
    not CRDS,
    reason="PLANNER_KUBEFLOW_CRDS names no folder with trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer and "
    "kubeflow.org_pytorchjobs.yaml of kubeflow/training-operator (manifests/base/crds)",
)


@cache
def plans(backend: str) -> tuple[PlanDocument, ...]:
    """Random and corner plans of a backend."""
    return (*random_plans(backend, PLANS, seed=7), *itertools.islice(corner_plans(backend), 0, None, 40))


@cache
def rendered(backend: str) -> tuple[dict[str, str], ...]:
    """The files of all plans of a backend, for every launcher."""
    return tuple(render_plan(document, launcher=LAUNCHERS) for document in plans(backend))


def manifest(files: dict[str, str], kind: str) -> dict[str, Any]:
    """The job of a kind, read from its file."""
    read: dict[str, Any] = yaml.safe_load(files[f"{kind.lower()}.yaml"])
    return read


@cache
def schema(kind: str) -> dict[str, Any]:
    """The strictest schema at hand: the published one, else our transcription."""
    return published(Path(CRDS), kind, KINDS[kind]) if CRDS else transcribed(kind)


# --- shells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", RENDERED_BACKENDS)
def test_bash_accepts_every_script(backend: str, tmp_path: Path) -> None:
    """``bash -n`` finds no fault in any script of any launcher."""
    texts = {text for files in rendered(backend) for text in files.values() if text.startswith("#!")}
    assert len(texts) >= 20
    for text in texts:
        result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr + text


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("backend", RENDERED_BACKENDS)
def test_shellcheck_has_no_objection(backend: str, tmp_path: Path) -> None:
    """shellcheck is silent on the scripts of some plans and on the shell text inside manifests."""
    for index, files in enumerate(rendered(backend)[::25]):
        folder = tmp_path / str(index)
        write_files(folder, files)
        inner = {
            "pod.sh": manifest(files, "TrainJob")["spec"]["trainer"]["command"][2],
            "task.sh": yaml.safe_load(files["skypilot.yaml"])["run"],
        }
        for name, text in inner.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        scripts = [name for name, text in files.items() if text.startswith("#!")] + list(inner)
        command = ["shellcheck", "-x", *scripts]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shells_object_to_broken_scripts(tmp_path: Path) -> None:
    """An open quote is refused by bash, a word that would be split by shellcheck: both checks can fail."""
    files = render_plan(CASES["fsdp-full"].document)
    text = files["launch.sh"]
    syntax = subprocess.run(["bash", "-n"], input=text + 'echo "x\n', capture_output=True, text=True, check=False)
    assert syntax.returncode != 0
    path = tmp_path / "launch.sh"
    path.write_text(text.replace('--node-rank "$NODE_RANK"', "--node-rank $NODE_RANK"), encoding="utf-8")
    assert subprocess.run(["shellcheck", str(path)], capture_output=True, check=False).returncode != 0


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", RENDERED_BACKENDS)
def test_kubeflow_takes_every_job(backend: str, kind: str, counts: Counts) -> None:
    """No manifest has a field, a type or a value that the schema or the operator's webhook refuses."""
    for files in rendered(backend):
        job = manifest(files, kind)
        assert (job["kind"], job["apiVersion"]) == (kind, KINDS[kind])
        assert schema_refusals(job, schema(kind)) == []
        assert operator_refusals(job) == []
    counts(Row(target=kind, parser=READ_BY, plans=len(rendered(backend))))


@pytest.mark.parametrize("backend", RENDERED_BACKENDS)
def test_jobs_have_the_world_of_the_plan(backend: str) -> None:
    """Nodes times processes are the plan's GPUs in every launcher, and pods leave the system its part of the host."""
    for document, files in zip(plans(backend), rendered(backend), strict=True):
        cluster = document.request.cluster
        train, torch = manifest(files, "TrainJob")["spec"]["trainer"], manifest(files, "PyTorchJob")["spec"]
        roles = torch["pytorchReplicaSpecs"]
        task = yaml.safe_load(files["skypilot.yaml"])
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", files["job.sbatch"], re.MULTILINE))
        worlds = {
            train["numNodes"] * train["numProcPerNode"],
            sum(role["replicas"] for role in roles.values()) * int(torch["nprocPerNode"]),
            task["num_nodes"] * sum(task["resources"]["accelerators"].values()),
            int(options["nodes"]) * int(options["gpus-per-node"]),
            files["mpi_hosts"].count("\n") * cluster.local_gpus,
        }
        assert worlds == {document.best.strategy.gpus}
        asked = train["resourcesPerNode"]["requests"]
        assert int(asked["memory"].removesuffix("Gi")) * 2**30 <= cluster.host_memory_bytes_per_node
        assert int(asked["memory"].removesuffix("Gi")) * 2**30 >= document.best.estimate.host_memory_bytes_per_node
        assert int(asked["cpu"]) < cluster.host_cores_per_node
        assert gpus(train["resourcesPerNode"]) == cluster.local_gpus


@pytest.mark.parametrize(
    ("plan_id", "name"),
    [("0123456789abcdef", "plan-0123456789ab"), ("é/$(x)-Y", "plan-xy"), ("漢", "plan-0"), ("", "plan-0")],
)
def test_names_of_jobs_are_labels(plan_id: str, name: str) -> None:
    """Whatever the id of an edited plan, the job's name is one that every launcher takes."""
    document = CASES["fsdp-full"].document.model_copy(update={"id": plan_id})
    files = render_plan(document, launcher=LAUNCHERS)
    for kind in KINDS:
        assert manifest(files, kind)["metadata"]["name"] == name
        assert operator_refusals(manifest(files, kind)) == []
    assert yaml.safe_load(files["skypilot.yaml"])["name"] == name
    assert f"#SBATCH --job-name={name}\n" in files["job.sbatch"]


def base(kind: str) -> dict[str, Any]:
    """A good manifest of several nodes."""
    return manifest(render_plan(CASES["launch-kubernetes"].document, launcher="trainjob,pytorchjob"), kind)


Change = Callable[[dict[str, Any]], object]


def steps(path: str) -> list[int | str]:
    """Keys and positions of a path; a slash inside a key is written ~."""
    return [int(part) if part.isdigit() else part.replace("~", "/") for part in path.split("/")]


def put(path: str, value: Any) -> Change:
    """A change that sets the entry at a path of keys and positions."""

    def change(document: dict[str, Any]) -> None:
        *way, last = steps(path)
        target: Any = document
        for part in way:
            target = target[part]
        target[last] = value

    return change


def drop(path: str) -> Change:
    """A change that removes the entry at a path."""

    def change(document: dict[str, Any]) -> None:
        *way, last = steps(path)
        target: Any = document
        for part in way:
            target = target[part]
        del target[last]

    return change


PATCH = "spec/runtimePatches/0"
POD = f"{PATCH}/trainingRuntimeSpec/template/spec/replicatedJobs/0/template/spec/template/spec"
MASTER = "spec/pytorchReplicaSpecs/Master"
CONTAINER = f"{MASTER}/template/spec/containers/0"

BROKEN_SCHEMA: dict[str, tuple[str, Change]] = {
    "no runtime": ("TrainJob", drop("spec/runtimeRef")),
    "misspelt nodes": ("TrainJob", put("spec/trainer/numNode", 8)),
    "processes as text": ("TrainJob", put("spec/trainer/numProcPerNode", "8")),
    "processes auto": ("TrainJob", put("spec/trainer/numProcPerNode", "auto")),
    "no processes": ("TrainJob", put("spec/trainer/numProcPerNode", 0)),
    "number as variable": ("TrainJob", put("spec/trainer/env/0/value", 8)),
    "command as text": ("TrainJob", put("spec/trainer/command", "torchrun train.py")),
    "resources misplaced": ("TrainJob", put("spec/trainer/resources", {"limits": {"nvidia.com/gpu": 8}})),
    "memory that is no quantity": ("TrainJob", put("spec/trainer/resourcesPerNode/limits/memory", "2000 GiB")),
    "patch without manager": ("TrainJob", drop(f"{PATCH}/manager")),
    "the older name of patches": ("TrainJob", put("spec/podTemplateOverrides", [])),
    "image in a patch": ("TrainJob", put(f"{POD}/containers/0/image", "x")),
    "resources in a patch": ("TrainJob", put(f"{POD}/containers/0/resources", {})),
    "volume without name": ("TrainJob", drop(f"{POD}/volumes/0/name")),
    "volume of an unknown kind": ("TrainJob", put(f"{POD}/volumes/1", {"name": "x", "memory": "1Gi"})),
    "processes as number": ("PyTorchJob", put("spec/nprocPerNode", 8)),
    "misspelt processes": ("PyTorchJob", put("spec/nProcPerNode", "8")),
    "no replicas section": ("PyTorchJob", drop("spec/pytorchReplicaSpecs")),
    "replicas as text": ("PyTorchJob", put(f"{MASTER}/replicas", "1")),
    "unknown policy": ("PyTorchJob", put("spec/runPolicy/cleanPodPolicies", "None")),
    "policy of no value": ("PyTorchJob", put("spec/runPolicy/cleanPodPolicy", False)),
    "port as text": ("PyTorchJob", put(f"{CONTAINER}/ports/0/containerPort", "29500")),
    "no containers": ("PyTorchJob", drop(f"{MASTER}/template/spec/containers")),
    "unknown field of a container": ("PyTorchJob", put(f"{CONTAINER}/gpu", 8)),
}
"""What the schemas refuse: name -> kind and change."""

BROKEN_RULES: dict[str, tuple[str, Change]] = {
    "reserved variable": ("TrainJob", put("spec/trainer/env/0/name", "PET_NNODES")),
    "other processes than GPUs": ("TrainJob", put("spec/trainer/numProcPerNode", 4)),
    "asked for more than the limit": ("TrainJob", put("spec/trainer/resourcesPerNode/requests/nvidia.com~gpu", 9)),
    "manager without domain": ("TrainJob", put(f"{PATCH}/manager", "planner")),
    "job that the runtime lacks": (
        "TrainJob",
        put(f"{PATCH}/trainingRuntimeSpec/template/spec/replicatedJobs/0/name", "trainer"),
    ),
    "container that the runtime lacks": ("TrainJob", put(f"{POD}/containers/0/name", "trainer")),
    "variables in a patch": ("TrainJob", put(f"{POD}/containers/0/env", [{"name": "A", "value": "1"}])),
    "mount without volume": ("TrainJob", put(f"{POD}/containers/0/volumeMounts/0/name", "plans")),
    "no shared memory": ("TrainJob", drop(f"{POD}/containers/0/volumeMounts/1")),
    "name of a TrainJob": ("TrainJob", put("metadata/name", "0123_Plan")),
    "container of another name": ("PyTorchJob", put(f"{CONTAINER}/name", "trainer")),
    "two masters": ("PyTorchJob", put(f"{MASTER}/replicas", 2)),
    "no worker in the section": ("PyTorchJob", put("spec/pytorchReplicaSpecs/Worker/replicas", 0)),
    "unknown role": (
        "PyTorchJob",
        put("spec/pytorchReplicaSpecs/Chief", {"replicas": 1, "template": {"spec": {"containers": []}}}),
    ),
    "no image": ("PyTorchJob", drop(f"{CONTAINER}/image")),
    "other processes than the GPUs": ("PyTorchJob", put("spec/nprocPerNode", "4")),
    "name of a PyTorchJob": ("PyTorchJob", put("metadata/name", "0plan")),
}
"""What only the operators refuse."""


@pytest.mark.parametrize("name", BROKEN_SCHEMA)
def test_schemas_refuse_broken_jobs(name: str, counts: Counts) -> None:
    """Each change is refused by our transcription, and by the published definition where there is one."""
    kind, change = BROKEN_SCHEMA[name]
    job = base(kind)
    change(job)
    assert schema_refusals(job, transcribed(kind))
    assert schema_refusals(job, schema(kind))
    counts(Row(target=kind, parser=READ_BY, broken=1, both=1))


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_operators_refuse_broken_jobs(name: str, counts: Counts) -> None:
    """Each change passes as far as schemas go and is refused by a rule of the operator, or starts another world."""
    kind, change = BROKEN_RULES[name]
    job = base(kind)
    change(job)
    assert operator_refusals(job)
    counts(Row(target=kind, parser=READ_BY, broken=1, ours=1))


@needs_crds
@pytest.mark.parametrize("kind", KINDS)
def test_transcription_agrees_with_the_published_definition(kind: str) -> None:
    """Every field we transcribed exists under that name, with that type, and is required where ours is."""
    ours = transcribed(kind)
    compared = sum(1 for _ in disagreements(ours, published(Path(CRDS), kind, KINDS[kind]), ours["$defs"], kind))
    assert compared > 50


def disagreements(ours: Any, theirs: Any, shared: dict[str, Any], path: str) -> Iterator[str]:
    """Compare two schemas field by field; yields every path that was compared."""
    if "$ref" in ours:
        ours = shared[ours["$ref"].rsplit("/", 1)[1]]
    yield path
    if "anyOf" in ours:
        assert "anyOf" in theirs, path
        return
    assert ours["type"] == theirs["type"], path
    assert set(ours.get("required", ())) == set(theirs.get("required", ())) or path in KINDS, path
    for name, field in ours.get("properties", {}).items():
        assert name in theirs["properties"], f"{path}/{name}"
        yield from disagreements(field, theirs["properties"][name], shared, f"{path}/{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(ours.get(key), dict) and isinstance(theirs.get(key), dict):
            yield from disagreements(ours[key], theirs[key], shared, f"{path}/{key}")


MODELS_TAKE = {"no processes", "memory that is no quantity", "volume without name"}
"""What the models accept although the API server refuses it: they know types, but neither bounds, nor patterns, nor all
that is required."""


@pytest.mark.skipif(bool(lacking("kubeflow_trainer_api")), reason=lacking("kubeflow_trainer_api"))
def test_kubeflow_models_read_train_jobs(tmp_path: Path, counts: Counts) -> None:
    """The operator's own models take every TrainJob whole, and refuse broken ones."""
    good = [files["trainjob.yaml"] for backend in RENDERED_BACKENDS for files in rendered(backend)]
    bad = {}
    for name, (kind, change) in BROKEN_SCHEMA.items():
        if kind == "TrainJob":
            job = base(kind)
            change(job)
            bad[name] = yaml.safe_dump(job)
    paths = []
    for index, text in enumerate([*good, *bad.values()]):
        paths.append(tmp_path / f"{index}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    command = [PYTHON, str(HERE / "run_kubeflow.py"), *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    refusals = [json.loads(line) for line in result.stdout.splitlines()]
    assert [refusal for refusal in refusals[: len(good)] if refusal] == []
    taken = {name for name, refusal in zip(bad, refusals[len(good) :], strict=True) if not refusal}
    assert taken == MODELS_TAKE
    row = {"plans": len(good), "broken": len(bad), "both": len(bad) - len(taken), "ours": len(taken)}
    counts(Row(target="TrainJob", parser=parser("kubeflow-trainer-api"), **row))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("backend", RENDERED_BACKENDS)
def test_kustomize_builds_the_config_map(backend: str, tmp_path: Path) -> None:
    """kustomize makes the ConfigMap that the jobs mount, with every file that launch.sh needs, unchanged."""
    files = rendered(backend)[0]
    write_files(tmp_path / "out", files)
    command = ["kubectl", "kustomize", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    built = yaml.safe_load(result.stdout)
    wrappers = {"job.sbatch", "trainjob.yaml", "pytorchjob.yaml", "kustomization.yaml", "skypilot.yaml", "mpi_hosts"}
    wrappers |= {"launch_mpirun.sh", "launch_deepspeed.sh", "hostfile", ".deepspeed_env", "plan.json", "README.md"}
    assert built["kind"] == "ConfigMap"
    assert built["data"] == {name.replace("/", "__"): text for name, text in files.items() if name not in wrappers}
    pod = manifest(files, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "plan")
    assert volume["configMap"]["name"] == built["metadata"]["name"]


def test_files_in_folders_keep_their_place(tmp_path: Path) -> None:
    """A file in a folder gets a key without a slash, and the volumes of both jobs put it back where it was."""
    case = CASES["fsdp-full"].document
    made = [
        kubernetes_files(case, Launch("train.py", "", ()), (), ["launch.sh", "conf/run.toml"], kind)
        for kind in ("trainjob", "pytorchjob")
    ]
    write_files(tmp_path / "out", {**made[0].files, "launch.sh": "#!/bin/sh\n", "conf/run.toml": "a = 1\n"})
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(tmp_path / "out")]
        built = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert built["data"] == {"launch.sh": "#!/bin/sh\n", "conf__run.toml": "a = 1\n"}
    items = [
        {"key": "conf__run.toml", "path": "conf/run.toml"},
        {"key": "launch.sh", "path": "launch.sh"},
    ]
    train, torch = yaml.safe_load(made[0].files["trainjob.yaml"]), yaml.safe_load(made[1].files["pytorchjob.yaml"])
    for job in (train, torch):
        assert schema_refusals(job, schema(job["kind"])) == []
        assert operator_refusals(job) == []
    patch = train["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pods = [patch["template"]["spec"]["template"]["spec"]]
    pods += [role["template"]["spec"] for role in torch["spec"]["pytorchReplicaSpecs"].values()]
    assert all(pod["volumes"][0]["configMap"]["items"] == items for pod in pods)


# --- mpirun -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["launch-hosts", "fsdp-full", "deepspeed-zero3"])
def test_mpirun_hands_variables_on(name: str, tmp_path: Path) -> None:
    """What is set reaches every node, what is not set is not asked for, and nothing binds all ranks to one core."""
    files = render_plan(CASES[name].document, launcher="mpirun")
    write_files(tmp_path / "out", files)
    fake = tmp_path / "tools" / "mpirun"
    fake.parent.mkdir()
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    fake.chmod(0o755)
    given = {"TRAIN_SCRIPT": "/t.py", "MEGATRON_PATH": "/m", "DATA_PATH": "/d", "TOKENIZER_MODEL": "t"}
    result = subprocess.run(
        ["bash", str(tmp_path / "out" / "launch_mpirun.sh"), "--more"],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    words = result.stdout.splitlines()
    passed = {after for word, after in itertools.pairwise(words) if word == "-x"}
    read = {name for name in given if any(f"${{{name}:" in text for text in files.values())}
    assert passed == {"PATH", "HEAD_NODE", "HEAD_PORT"} | read
    assert words[words.index("--bind-to") + 1] == "none"
    assert words[-1] == "--more"


# --- SkyPilot ---------------------------------------------------------------------------------------------------------

BROKEN_TASKS: dict[str, Change] = {
    "misspelt nodes": put("num_node", 2),
    "nodes as text": put("num_nodes", "two"),
    "no nodes": put("num_nodes", 0),
    "misspelt accelerators": put("resources/accelerator", "H100:8"),
    "accelerators without count": put("resources/accelerators", {"H100": "eight"}),
    "unknown network": put("resources/network_tier", "fastest"),
    "bad name": put("name", "plan of mine"),
    "variable of no name": put("envs", {"A-B": "1"}),
    "variable without value": put("envs", {"NOT_GIVEN": None}),
    "run as list": put("run", ["./launch.sh"]),
}


@pytest.mark.skipif(bool(lacking("sky")), reason=f"{PYTHON} has no skypilot, which wants an own environment")
def test_skypilot_reads_every_task(tmp_path: Path, counts: Counts) -> None:
    """SkyPilot's own parser takes every task with the nodes and GPUs of its plan, and refuses broken ones."""
    documents = [document for backend in RENDERED_BACKENDS for document in plans(backend)]
    tasks = [yaml.safe_load(files["skypilot.yaml"]) for backend in RENDERED_BACKENDS for files in rendered(backend)]
    good = [{"task": task, "env": [(name, "/x") for name in task.get("envs", {})]} for task in tasks]
    bad = []
    text = render_plan(CASES["launch-skypilot"].document, launcher="skypilot")["skypilot.yaml"]
    for change in BROKEN_TASKS.values():
        task = yaml.safe_load(text)
        change(task)
        bad.append({"task": task, "env": []})
    read = sky([*good, *bad], tmp_path)
    assert [answer["refusal"] for answer in read[: len(good)] if answer["refusal"]] == []
    for document, answer in zip(documents, read, strict=False):
        cluster = document.request.cluster
        assert answer["nodes"] == cluster.nodes
        assert [list(each.values()) for each in answer["accelerators"]] == [[cluster.local_gpus]]
        assert answer["run"]
    assert [name for name, answer in zip(BROKEN_TASKS, read[len(good) :], strict=True) if not answer["refusal"]] == []
    counts(Row(target="skypilot", parser=parser("skypilot"), plans=len(good), broken=len(bad), both=len(bad)))


def sky(cases: list[dict[str, Any]], home: Path) -> list[dict[str, Any]]:
    """What SkyPilot answers to each case, in one process; its own files go below ``home``."""
    # The working directory must be the folder of the files: a task says `workdir: .`.
    result = subprocess.run(
        [PYTHON, str(HERE / "run_skypilot.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        cwd=home,
        env={**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_accelerators_of_skypilot_are_ours() -> None:
    """Every entry of the table belongs to an accelerator of the catalogue."""
    for name in ACCELERATORS:
        assert load_accelerator(name).id == name


# --- Slurm ------------------------------------------------------------------------------------------------------------

NO_SLURM = [name for name in ("slurmctld", "sbatch", "scontrol", "munge") if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(
    bool(NO_SLURM) or os.geteuid() != 0,
    reason=f"needs root and slurmctld, sbatch, munged (apt-get install slurm-wlm); not here: {', '.join(NO_SLURM)}",
)

BROKEN_JOBS = {
    "more nodes than there are": ("--nodes=8", "--nodes=9"),
    "more GPUs than a node has": ("--gpus-per-node=8", "--gpus-per-node=16"),
    "more cores than a node has": ("--cpus-per-task=96", "--cpus-per-task=97"),
    "more memory than a node has": ("--mem=0", "--mem=9000G"),
    "misspelt option": ("--ntasks-per-node", "--tasks-by-node"),
    "longer than the partition allows": ("--exclusive", "--time=30-00:00:00"),
}


def slurm_version() -> str:
    return subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip()


def slurm(scripts: list[Path], nodes: int, gpus_per_node: int, cores: int, memory_mb: int) -> list[tuple[int, str]]:
    """Exit code and message of ``sbatch --test-only`` for each script, on pretended nodes."""
    command = [
        str(HERE / "run_slurm.sh"),
        "check",
        *map(str, (nodes, gpus_per_node, cores, memory_mb)),
        *map(str, scripts),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split("\t", 1) for line in result.stdout.splitlines()]
    return [(int(code), said) for code, said in lines]


@needs_slurm
def test_slurm_would_run_every_job(tmp_path: Path, counts: Counts) -> None:
    """A controller of nodes like the plan's would start each job on exactly the plan's number of nodes."""
    shapes: dict[tuple[int, int, int], list[tuple[int, Path]]] = {}
    seen = set()
    for backend in RENDERED_BACKENDS:
        for document, files in zip(plans(backend), rendered(backend), strict=True):
            options = "".join(re.findall(r"^#SBATCH --(?!job-name).*$", files["job.sbatch"], re.MULTILINE))
            if options in seen:
                continue
            seen.add(options)
            path = tmp_path / f"{len(seen)}.sbatch"
            path.write_text(files["job.sbatch"], encoding="utf-8")
            cluster = document.request.cluster
            # A node offers somewhat less memory than its data sheet says.
            memory = cluster.host_memory_bytes_per_node * 95 // 100 // 2**20
            shape = (cluster.gpus_per_node, cluster.host_cores_per_node, memory)
            shapes.setdefault(shape, []).append((cluster.nodes, path))
    assert len(seen) >= 5
    for shape, jobs in shapes.items():
        answers = slurm([path for _, path in jobs], max(nodes for nodes, _ in jobs), *shape)
        for (nodes, path), (code, said) in zip(jobs, answers, strict=True):
            assert code == 0, said + path.read_text(encoding="utf-8")
            assert nodes_of(said) == nodes
    # Jobs that differ by their name alone are one job to Slurm.
    counts(Row(target="slurm", parser=slurm_version(), plans=len(seen)))


def nodes_of(said: str) -> int:
    """The number of nodes in "Job 1 to start at ... on nodes n[0001-0016] in partition all"."""
    match = re.search(r"on nodes n\[?([\d,-]+)\]? in", said)
    assert match, said
    spans = [[int(end) for end in span.split("-")] for span in match[1].split(",")]
    return sum(span[-1] - span[0] + 1 for span in spans)


@needs_slurm
def test_slurm_refuses_broken_jobs(tmp_path: Path, counts: Counts) -> None:
    """Each change of a good job is refused by the controller; the job itself is not."""
    text = render_plan(CASES["launch-kubernetes"].document, launcher="slurm")["job.sbatch"]
    paths = [tmp_path / "good.sbatch"]
    paths[0].write_text(text, encoding="utf-8")
    for index, (old, new) in enumerate(BROKEN_JOBS.values()):
        assert text.count(old) >= 1
        paths.append(tmp_path / f"{index}.sbatch")
        paths[-1].write_text(text.replace(old, new, 1), encoding="utf-8")
    (good, said), *bad = slurm(paths, 8, 8, 96, 2_000_000)
    assert good == 0, said
    assert [name for name, (code, _) in zip(BROKEN_JOBS, bad, strict=True) if code == 0] == []
    counts(Row(target="slurm", parser=slurm_version(), broken=len(bad), both=len(bad)))


def test_strictness_reaches_every_level() -> None:
    """The published schema made strict refuses an unknown field in a list inside a map."""
    loose = {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "additionalProperties": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"b": {"type": "integer", "format": "int32"}}},
                },
            }
        },
    }
    assert schema_refusals({"a": {"x": [{"b": 1}]}}, strict(loose)) == []
    assert schema_refusals({"a": {"x": [{"c": 1}]}}, strict(loose))
