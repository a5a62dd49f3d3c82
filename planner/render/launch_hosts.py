"""Slurm and mpirun: machines that a scheduler or a list of hosts gives, one task a node that runs ``launch.sh``.

Both number their tasks in the order of the node list, so which node holds which ranks is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from planner.specs.plan import PlanDocument

SLURM_FILE = "job.sbatch"
SLURM_COMMAND = f"sbatch {SLURM_FILE}"
MPIRUN_FILE = "launch_mpirun.sh"
MPIRUN_COMMAND = f"./{MPIRUN_FILE}"
MPI_HOSTS = "mpi_hosts"


def slurm_files(document: PlanDocument, launch: Launch) -> LauncherFiles:
    """``job.sbatch``: one task a node, each of which runs ``launch.sh`` with its node number."""
    cluster = document.request.cluster
    name = job_name(document)
    whole = cluster.local_gpus == cluster.gpus_per_node
    script = fill(
        "launch/job.sbatch.j2",
        {
            "title": one_line(document.request.model.name),
            "job_name": name,
            "nodes": cluster.nodes,
            # Processes on cores ask Slurm for no GPUs: it would refuse them where there are none.
            "gpus_per_node": 0 if cluster.accelerator.synchronous else cluster.local_gpus,
            "cpus_per_task": cores(cluster),
            "whole_nodes": whole,
            "memory_gib": host_memory_gib(cluster),
        },
    )
    before = [
        "Add the partition, account and time limit that your cluster asks for, in the file or on the command line."
    ]
    if needed := needed_variables(launch):
        names = ", ".join(f"`{variable.name}`" for variable in needed)
        before.append(f"Export {names} first: Slurm hands your environment to the job.")
    start = Start(
        "With Slurm, from this folder",
        SLURM_COMMAND,
        tuple(before),
        f"All ranks print to `{name}-<job id>.log` in this folder; `squeue --me` says why a job waits.",
    )
    return LauncherFiles({SLURM_FILE: script}, {SLURM_FILE: "a Slurm job that runs launch.sh on every node"}, start)


def mpirun_files(
    document: PlanDocument, launch: Launch, optional: Sequence[str], hosts: Sequence[str], *, given: bool
) -> LauncherFiles:
    """``launch_mpirun.sh`` for Open MPI: one process a node, which runs ``launch.sh``; ``mpi_hosts`` lists them."""
    cluster = document.request.cluster
    passed = [*(variable.name for variable in needed_variables(launch)), *optional]
    script = fill(
        "launch/mpirun.sh.j2",
        {
            "title": one_line(document.request.model.name),
            "nodes": cluster.nodes,
            "port": RENDEZVOUS_PORT,
            "hosts_file": MPI_HOSTS,
            "passed": passed,
        },
    )
    before = ["On the first node only, with Open MPI there and this folder at the same path on every node."]
    if not given:
        before.insert(0, f"Put your host names into `{MPI_HOSTS}`, the leading one first.")
    return LauncherFiles(
        {MPIRUN_FILE: script, MPI_HOSTS: "".join(f"{host} slots=1\n" for host in hosts)},
        {
            MPIRUN_FILE: "runs launch.sh on every node with Open MPI, from the first node",
            MPI_HOSTS: "the nodes for it" + ("" if given else "; the names are placeholders"),
        },
        Start("With mpirun", MPIRUN_COMMAND, tuple(before), "The ranks print to this terminal."),
    )
