"""Jobs whose processes run on cores ask no scheduler for GPUs; the same job on GPUs asks every scheduler for them."""

from __future__ import annotations

import functools

import pytest
import yaml

from planner import service
from planner.service import ClusterInput, JobInput, PlanRequest
from planner.specs.cluster_file import ClusterFile
from tests.parsers.kubeflow_rules import schema_refusals, transcribed

LAUNCHERS = "slurm,trainjob,pytorchjob,skypilot"


@functools.cache
def files(gpu: str) -> dict[str, str]:
    """Everything that starts a small plan on two nodes of two."""
    machines = ClusterFile(gpu=gpu, nodes=2, gpus_per_node=2, host_memory_gib=64, host_cores=8)
    asked = PlanRequest(
        model="gpt2-124m",
        cluster=ClusterInput(file=machines),
        job=JobInput(seq_len=256, global_batch=8),
        backend="pytorch",
    )
    return service.render_document(service.suggest(asked), launcher=LAUNCHERS)


@pytest.mark.parametrize(("gpu", "asks"), [("cpu", False), ("l4", True)])
def test_who_is_asked_for_gpus(gpu: str, asks: bool) -> None:
    """sbatch options, resources of both kinds of pods, and SkyPilot's resources."""
    made = files(gpu)
    assert ("#SBATCH --gpus-per-node=2" in made["job.sbatch"]) == asks
    assert ("nvidia.com/gpu" in made["trainjob.yaml"]) == asks
    assert ("nvidia.com/gpu" in made["pytorchjob.yaml"]) == asks
    wanted = yaml.safe_load(made["skypilot.yaml"])["resources"]
    assert wanted["network_tier"] == "best"
    assert ("accelerators" in wanted, "cpus" in wanted) == (asks, not asks)


@pytest.mark.parametrize(("file", "kind"), [("trainjob.yaml", "TrainJob"), ("pytorchjob.yaml", "PyTorchJob")])
def test_kubeflow_takes_jobs_on_cores(file: str, kind: str) -> None:
    """The manifests stay what the definitions allow, with cores and memory."""
    manifest = yaml.safe_load(files("cpu")[file])
    assert schema_refusals(manifest, transcribed(kind)) == []
    assert "'cpu': '7'" in str(manifest)
