"""Rendered launch scripts are started for real: gloo ranks on this machine find the plan's world, ranks and groups.

Needs torch: in this environment, or in the interpreter that PLANNER_PARSERS_PYTHON names (with torchrun beside it).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.render import render_plan, write_files
from planner.render.launch import job_name
from planner.specs.model import ModelSpec, MoeSpec
from planner.specs.plan import PlanDocument
from tests.golden.plans import LLAMA_8B, document
from tests.parsers.interpreter import INSTALL, PYTHON

STAND_IN = Path(__file__).with_name("stand_in_training.py")
LIMIT_S = 120
SLURM_CORES = 2
"""Cores that each node of run_slurm.sh has."""

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not Path(PYTHON).with_name("torchrun").exists(),
        reason=f"no torchrun beside {PYTHON}: {INSTALL}",
    ),
]

MIXTURE = ModelSpec(
    name="mixture",
    layers=4,
    hidden=256,
    ffn=512,
    heads=8,
    kv_heads=8,
    head_dim=32,
    vocab=1024,
    max_seq=4096,
    moe=MoeSpec(experts=4, top_k=2, expert_ffn=256),
)


@dataclass(frozen=True)
class Plan:
    """A small plan, and how many of its ranks share a node."""

    backend: str
    strategy: dict[str, Any]
    local: int
    axes: set[str]
    """Dimensions along which more than one rank lies."""
    model: ModelSpec = field(default=LLAMA_8B)

    def document(self) -> PlanDocument:
        """The plan on nodes of ``local`` GPUs."""
        made = document(self.backend, self.strategy, model=self.model)
        cluster = made.request.cluster.model_copy(
            update={"gpus_per_node": self.local, "domain_gpus": self.local, "host_cores_per_node": SLURM_CORES}
        )
        return made.model_copy(update={"request": made.request.model_copy(update={"cluster": cluster})})


PIPELINE: dict[str, Any] = {"pp": 2, "pipeline_schedule": "1f1b", "layers_per_stage": (16, 16)}
TENSOR: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SHARDED: dict[str, Any] = {"dp": 2, "zero_stage": 1, "shard_degree": 2}
PLANS = {
    "fsdp-2": Plan("fsdp", {"dp": 2, "zero_stage": 3, "shard_degree": 2}, 2, {"dp_shard"}),
    "fsdp-2x2": Plan("fsdp", {**TENSOR, "dp": 2, "zero_stage": 3, "shard_degree": 2}, 2, {"tp", "dp_shard"}),
    "megatron-4": Plan("megatron", {**TENSOR, **SHARDED}, 4, {"tp", "dp"}),
    "megatron-2x2": Plan("megatron", {**TENSOR, **PIPELINE}, 2, {"tp", "pp"}),
    "megatron-experts-2x2": Plan(
        "megatron", {"dp": 4, "ep": 2, "zero_stage": 1, "shard_degree": 4}, 2, {"dp", "ep", "edp"}, MIXTURE
    ),
    "deepspeed-4": Plan("deepspeed", {**SHARDED, **PIPELINE}, 4, {"dp", "pp"}),
    "deepspeed-2x2": Plan("deepspeed", {**SHARDED, **PIPELINE}, 2, {"dp", "pp"}),
}
ONE_NODE = [name for name in PLANS if "x" not in name]
TWO_NODES = [name for name in PLANS if "x" in name]


@dataclass
class Started:
    """The files of a plan on disk, and what its ranks must report."""

    plan: Plan
    folder: Path
    variables: dict[str, str]
    groups: dict[str, list[list[int]]]
    port: int


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Started:
    """The plan of the test's parameter, rendered for every launcher, with the stand-in as its training script."""
    plan = PLANS[request.param]
    folder = tmp_path / "a run"
    files = render_plan(plan.document(), launcher="slurm,trainjob,pytorchjob,skypilot,mpirun")
    write_files(folder, files)
    groups = stated_groups(files["README.md"], plan.document().best.strategy.gpus)
    assert set(groups) == plan.axes
    megatron = tmp_path / "megatron"
    megatron.mkdir()
    shutil.copy(STAND_IN, megatron / "pretrain_gpt.py")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "PATH": f"{tools}:{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        # Gloo would otherwise use whatever address the host name resolves to.
        "GLOO_SOCKET_IFNAME": "lo",
        "PLAN_GROUPS": json.dumps(groups),
        "PLAN_IMPORTS": {"fsdp": "parallelize", "deepspeed": "parallel_setup"}.get(plan.backend, ""),
        "TRAIN_SCRIPT": str(STAND_IN),
        "MEGATRON_PATH": str(megatron),
    }
    return Started(plan, folder, variables, groups, port)


def stated_groups(guide: str, ranks: int) -> dict[str, list[list[int]]]:
    """All groups of every axis, from the size and stride that the guide's tables state."""
    groups = {}
    for axis, size, stride in re.findall(r"^\| (\w+) +\| (\d+) +\| [^|]* \| (\d+) +\|", guide, re.MULTILINE):
        members: dict[int, list[int]] = {}
        for rank in range(ranks):
            members.setdefault(rank - rank // int(stride) % int(size) * int(stride), []).append(rank)
        groups[axis] = list(members.values())
    return groups


FAKE_SRUN = """#!/usr/bin/env bash
# One process a task, with the node number that Slurm gives; options come before the first word without a dash.
while [[ "$1" == -* ]]; do
  [[ "$1" == --ntasks=* ]] && tasks="${1#*=}"
  shift
done
for (( node = 0; node < tasks; node++ )); do SLURM_NODEID=$node "$@" & done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "$status"
"""
FAKE_MPIRUN = """#!/usr/bin/env bash
# One process a node of -np; options that take a word are those of the script.
while [[ "$1" == -* ]]; do
  [[ "$1" == -np ]] && processes="$2"
  shift 2
done
for (( node = 0; node < processes; node++ )); do OMPI_COMM_WORLD_RANK=$node "$@" & done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "$status"
"""
TOOLS = {
    "srun": FAKE_SRUN,
    "mpirun": FAKE_MPIRUN,
    "scontrol": '#!/usr/bin/env bash\nprintf "127.0.0.1\\n127.0.0.1\\n"\n',
}
"""What a cluster would have on its path."""


@contextmanager
def processes(started: Started, commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> Iterator[list[str]]:
    """Run commands side by side and give what each printed; none is left behind."""
    running = [
        subprocess.Popen(
            command,
            cwd=started.folder,
            env={**started.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in commands
    ]
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in running]
        codes = [process.returncode for process in running]
        assert not any(codes), (codes, "\n".join(printed)[-6000:])
        yield printed
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def check(started: Started, printed: Sequence[str], *, ordered: bool = True) -> list[dict[str, Any]]:
    """Every rank of the plan reported once, on the right node, with the members of its groups; the reports."""
    strategy = started.plan.document().best.strategy
    reports = [json.loads(match) for text in printed for match in re.findall(r"STARTED (\{.*\})$", text, re.MULTILINE)]
    reports.sort(key=lambda report: int(report["RANK"]))
    assert [int(report["RANK"]) for report in reports] == list(range(strategy.gpus))
    for rank, report in enumerate(reports):
        assert int(report["WORLD_SIZE"]) == strategy.gpus
        assert int(report["LOCAL_WORLD_SIZE"]) == started.plan.local
        assert int(report["LOCAL_RANK"]) == rank % started.plan.local
        if ordered:
            assert int(report["GROUP_RANK"]) == rank // started.plan.local
        expected = {axis: next(group for group in groups if rank in group) for axis, groups in started.groups.items()}
        assert report["groups"] == expected
        assert report["imports"] == bool(started.variables["PLAN_IMPORTS"])
        if "tp" in report["groups"]:
            nodes = {member // started.plan.local for member in report["groups"]["tp"]}
            assert len(nodes) == 1, "tensor-parallel ranks must share a node"
    return reports


LAUNCH = ("bash", "./launch.sh", "--extra", "two words")


@pytest.mark.parametrize("started", ONE_NODE, indirect=True)
def test_one_node(started: Started) -> None:
    """launch.sh on one node starts every rank of the plan and hands its own arguments on."""
    with processes(started, [(LAUNCH, {})]) as printed:
        reports = check(started, printed)
    assert all(report["last_arguments"] == ["--extra", "two words"] for report in reports)
    wanted = "1" if started.plan.backend == "megatron" else None
    assert {report["CUDA_DEVICE_MAX_CONNECTIONS"] for report in reports} == {wanted}


@pytest.mark.parametrize("started", TWO_NODES, indirect=True)
def test_two_nodes_with_numbers(started: Started) -> None:
    """With NODE_RANK node k holds exactly the ranks that the guide's map says, whichever starts first."""
    head = {"HEAD_NODE": "127.0.0.1", "HEAD_PORT": str(started.port)}
    with processes(started, [(LAUNCH, {**head, "NODE_RANK": node}) for node in ("1", "0")]) as printed:
        reports = check(started, printed)
        assert ['"RANK": "0"' in text for text in printed] == [False, True]
    assert len(reports) == 4


@pytest.mark.parametrize("started", ["fsdp-2x2", "megatron-2x2"], indirect=True)
def test_two_nodes_without_numbers(started: Started) -> None:
    """With the c10d rendezvous the world, local ranks and groups are the plan's, in whatever order the nodes came."""
    head = {"HEAD_NODE": "127.0.0.1", "HEAD_PORT": str(started.port), "JOB_ID": "j"}
    with processes(started, [(LAUNCH, head), (LAUNCH, head)]) as printed:
        check(started, printed, ordered=False)
        for text in printed:
            ranks = sorted(int(rank) for rank in re.findall(r'"RANK": "(\d+)"', text))
            assert ranks in ([0, 1], [2, 3]), "a node holds neighbouring ranks"


@pytest.mark.parametrize("started", ["megatron-2x2", "fsdp-2"], indirect=True)
def test_slurm_body(started: Started) -> None:
    """The body of job.sbatch starts one launch.sh a node, with Slurm's node numbers."""
    nodes = started.plan.document().request.cluster.nodes
    variables = {
        "SLURM_SUBMIT_DIR": str(started.folder),
        "SLURM_JOB_NODELIST": "n[001-002]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": str(started.port),
    }
    with processes(started, [(("bash", "job.sbatch"), variables)]) as printed:
        check(started, printed)


@pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "sbatch", "munge")) or os.geteuid() != 0,
    reason="needs root and apt-get install slurm-wlm",
)
@pytest.mark.parametrize("started", ["megatron-2x2"], indirect=True)
def test_real_slurm_runs_the_job(started: Started) -> None:
    """sbatch, srun and two node daemons of a real Slurm run job.sbatch: ranks, nodes and groups are the plan's.

    The log lies where the guide says, and every rank may use all cores of its node.
    """
    for name in TOOLS:
        (started.folder.parent / "tools" / name).unlink()
    command = [str(Path(__file__).with_name("run_slurm.sh")), "run", str(started.folder), str(started.plan.local)]
    variables = {"PATH": f"{started.variables['PATH']}:/usr/sbin:/sbin"}
    with processes(started, [(command, variables)]) as printed:
        job = re.search(r"Submitted batch job (\d+)", printed[0])
        assert job, printed
    log = started.folder / f"{job_name(started.plan.document())}-{job[1]}.log"
    reports = check(started, [log.read_text(encoding="utf-8")])
    assert {report["cores"] for report in reports} == {SLURM_CORES}


@pytest.mark.parametrize("started", ["megatron-2x2"], indirect=True)
def test_slurm_body_refuses_another_size(started: Started) -> None:
    """A job that got fewer nodes than the plan is for ends at once and says so, instead of waiting for the others."""
    variables = {"SLURM_SUBMIT_DIR": str(started.folder), "SLURM_JOB_NODELIST": "n001", "SLURM_JOB_NUM_NODES": "1"}
    result = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=started.folder,
        env={**started.variables, **variables},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "for 2 nodes" in result.stderr


def operator_variables(started: Started, node: int) -> dict[str, str]:
    """What both of Kubeflow's operators set in the pod of a node, and what only the older one sets."""
    nodes, port = started.plan.document().request.cluster.nodes, str(started.port)
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(started.plan.local),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(nodes * started.plan.local),
        "RANK": str(node),
    }


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
@pytest.mark.parametrize("started", ["deepspeed-2x2", "fsdp-2"], indirect=True)
def test_pods(started: Started, kind: str) -> None:
    """A pod's command, with the operator's variables, starts the ranks of its node."""
    spec = yaml.safe_load((started.folder / f"{kind}.yaml").read_text(encoding="utf-8"))["spec"]
    nodes = started.plan.document().request.cluster.nodes
    if kind == "trainjob":
        pods = [spec["trainer"]["command"]] * spec["trainer"]["numNodes"]
    else:
        pods = [
            replica["template"]["spec"]["containers"][0]["command"]
            for replica in spec["pytorchReplicaSpecs"].values()
            for _ in range(replica["replicas"])
        ]
    assert len(pods) == nodes
    # The ConfigMap is mounted at /plan; here the folder itself lies elsewhere.
    commands = [
        ([word.replace("/plan/launch.sh", "./launch.sh") for word in pod], operator_variables(started, node))
        for node, pod in enumerate(pods)
    ]
    with processes(started, commands) as printed:
        check(started, printed)


@pytest.mark.parametrize("started", ["fsdp-2x2"], indirect=True)
def test_skypilot_run(started: Started) -> None:
    """The task's run section, with SkyPilot's variables, starts the ranks of its node."""
    run = yaml.safe_load((started.folder / "skypilot.yaml").read_text(encoding="utf-8"))["run"]
    shared = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "HEAD_PORT": str(started.port)}
    commands = [(("bash", "-c", run), {**shared, "SKYPILOT_NODE_RANK": str(node)}) for node in range(2)]
    with processes(started, commands) as printed:
        check(started, printed)


@pytest.mark.parametrize("started", ["megatron-2x2"], indirect=True)
def test_mpirun_script(started: Started) -> None:
    """launch_mpirun.sh starts one launch.sh a node, numbered by Open MPI."""
    (started.folder / "mpi_hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n", encoding="utf-8")
    with processes(started, [(("./launch_mpirun.sh",), {"HEAD_PORT": str(started.port)})]) as printed:
        check(started, printed)


@pytest.mark.skipif(not Path("/usr/bin/mpirun").exists(), reason="Open MPI is not installed")
@pytest.mark.parametrize("started", ["fsdp-2"], indirect=True)
def test_real_mpirun(started: Started) -> None:
    """Open MPI itself takes the options and starts the ranks of one node, on more than one core."""
    (started.folder / "mpi_hosts").write_text("localhost slots=1\n", encoding="utf-8")
    variables = {
        "PATH": f"{Path(PYTHON).parent}:/usr/bin:/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    with processes(started, [(("./launch_mpirun.sh",), variables)]) as printed:
        reports = check(started, printed)
    assert all(report["cores"] == len(os.sched_getaffinity(0)) for report in reports)


@pytest.mark.skipif(not Path(PYTHON).with_name("deepspeed").exists(), reason="deepspeed is not installed")
@pytest.mark.parametrize("started", ["deepspeed-4"], indirect=True)
def test_deepspeed_launcher(started: Started) -> None:
    """launch_deepspeed.sh starts the ranks of one node with DeepSpeed's own launcher."""
    with processes(started, [(("./launch_deepspeed.sh",), {})]) as printed:
        check_deepspeed(started, printed[0])


def check_deepspeed(started: Started, text: str) -> None:
    """DeepSpeed's launcher sets the rank and the world, not torchrun's other variables."""
    reports = [json.loads(match) for match in re.findall(r"STARTED (\{.*\})$", text, re.MULTILINE)]
    reports.sort(key=lambda report: int(report["RANK"]))
    assert [int(report["RANK"]) for report in reports] == [0, 1, 2, 3]
    for rank, report in enumerate(reports):
        assert report["WORLD_SIZE"] == "4"
        assert report["groups"] == {
            axis: next(group for group in groups if rank in group) for axis, groups in started.groups.items()
        }
        assert report["imports"]


@pytest.mark.parametrize("number", ["2", "-1", "x", "1 --nproc-per-node 1"])
@pytest.mark.parametrize("started", ["fsdp-2x2"], indirect=True)
def test_a_wrong_node_number_is_refused(started: Started, number: str) -> None:
    """A node number outside the plan ends at once instead of leaving the other nodes waiting."""
    variables = {**started.variables, "NODE_RANK": number, "HEAD_NODE": "127.0.0.1"}
    result = subprocess.run(
        ["bash", "launch.sh"],
        cwd=started.folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 2
    assert "NODE_RANK must be 0 to 1" in result.stderr
