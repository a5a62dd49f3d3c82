"""Launch scripts: torchrun on one or many nodes, an optional Slurm job around it, and DeepSpeed's own launcher.

What changes between clusters (head node, port, node number) comes from environment variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import InputError
from planner.render.engine import fill
from planner.render.text import Variable, one_line
from planner.specs.cluster import Cluster
from planner.specs.plan import PlanDocument

Launcher = Literal["torchrun", "slurm"]

RENDEZVOUS_PORT = 29500
"""torchrun's documented default port of the c10d rendezvous."""


@dataclass(frozen=True)
class Launch:
    """What a launch script starts."""

    script: str
    """The training script as shell text, already quoted."""
    arguments: str
    """Its arguments as shell text, already quoted."""
    variables: tuple[Variable, ...]
    prepare: tuple[str, ...] = ()
    """Shell lines that run before the launcher."""
    template: str = "launch/torchrun.sh.j2"
    """The launcher that ``launch.sh`` calls."""
    told: str = "torchrun"
    """Its name."""


def checked_launcher(name: str) -> Launcher:
    """``name`` if it is a launcher that can be rendered."""
    for known in get_args(Launcher):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise InputError("unknown launcher", where="launcher", got=repr(name), allowed=", ".join(get_args(Launcher)))


def launch_script(document: PlanDocument, launch: Launch, hosts: Sequence[str]) -> str:
    """``launch.sh``: the same script on every node."""
    cluster = document.request.cluster
    return fill(
        launch.template,
        {
            "title": one_line(document.request.model.name),
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.local_gpus,
            "head_node": shlex.quote(hosts[0]),
            "port": RENDEZVOUS_PORT,
            "job_id": f"plan-{document.id[:12]}",
            "variables": launch.variables,
            "prepare": launch.prepare,
            "script": launch.script,
            "arguments": launch.arguments,
        },
    )


def slurm_script(document: PlanDocument) -> str:
    """``job.sbatch``: one task a node, each of which runs ``launch.sh`` with its node number."""
    cluster = document.request.cluster
    return fill(
        "launch/job.sbatch.j2",
        {
            "title": one_line(document.request.model.name),
            "job_name": f"plan-{document.id[:12]}",
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.local_gpus,
            "cpus_per_task": _cores(cluster),
        },
    )


def _cores(cluster: Cluster) -> int:
    return max(1, cluster.host_cores_per_node * cluster.local_gpus // cluster.gpus_per_node)


def deepspeed_scripts(document: PlanDocument, launch: Launch, hosts: Sequence[str]) -> dict[str, str]:
    """``launch_deepspeed.sh``; for several nodes the ``hostfile`` it reads and the variables that it copies to "
    "them, too."""
    cluster = document.request.cluster
    script = fill(
        "launch/deepspeed.sh.j2",
        {
            "title": one_line(document.request.model.name),
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.local_gpus,
            "head_node": shlex.quote(hosts[0]),
            "port": RENDEZVOUS_PORT,
            "variables": launch.variables,
            "script": launch.script,
            "arguments": launch.arguments,
        },
    )
    if cluster.nodes == 1:
        return {"launch_deepspeed.sh": script}
    hostfile = "".join(f"{host} slots={cluster.local_gpus}\n" for host in hosts)
    environment = "".join(f"{variable.name}={variable.value}\n" for variable in launch.variables)
    return {"launch_deepspeed.sh": script, "hostfile": hostfile, ".deepspeed_env": environment}
