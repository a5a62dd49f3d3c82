"""What a launch script starts, and the script that every other way of starting calls: torchrun on one or many nodes.

What changes between clusters (head node, port, node number) comes from environment variables; DeepSpeed's own launcher
lies beside it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from planner.errors import InputError
from planner.render.engine import fill
from planner.render.text import Variable, one_line
from planner.specs.cluster import Cluster
from planner.specs.launcher import Launcher
from planner.specs.plan import PlanDocument
from planner.units import GIB

RENDEZVOUS_PORT = 29500
"""torchrun's documented default port of the c10d rendezvous."""

_NOT_IN_NAMES = re.compile(r"[^a-z0-9]")
_REQUIRED = re.compile(r"\$\{([A-Z_][A-Z0-9_]*):\?([^}]*)\}")
_SETTABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*):[-?]")


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


@dataclass(frozen=True)
class Start:
    """One way to start the job, for the guide."""

    heading: str
    """Opens the paragraph: ``With Slurm, from this folder``."""
    command: str
    """Shell text, from the folder of the files."""
    before: tuple[str, ...] = ()
    """What has to be edited or known first."""
    log: str = ""
    """Where the output of the ranks appears."""


@dataclass(frozen=True)
class LauncherFiles:
    """What one launcher adds to the files of a plan."""

    files: Mapping[str, str]
    told: Mapping[str, str]
    start: Start


@dataclass(frozen=True)
class Needed:
    """A variable without which ``launch.sh`` refuses to start."""

    name: str
    why: str


def checked_launchers(names: str) -> tuple[Launcher, ...]:
    """The launchers of a list with commas, each once; ``launch.sh`` for torchrun is always written."""
    known = get_args(Launcher)
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise InputError(
                "unknown launcher",
                where="launcher",
                got=repr(name),
                allowed=", ".join(known),
                hint="several may be given, with commas between them",
            )
    return tuple(name for name in known if name in chosen)


def needed_variables(launch: Launch) -> tuple[Needed, ...]:
    """What the user must set: every ``${NAME:?message}`` of the script's text, with its message."""
    text = "\n".join([*launch.prepare, launch.script, launch.arguments])
    found = {match[1]: Needed(match[1], one_line(match[2])) for match in _REQUIRED.finditer(text)}
    return tuple(found.values())


def optional_variables(launch: Launch, files: Mapping[str, str]) -> tuple[str, ...]:
    """Names of what the user may set: each ``${NAME:-default}`` of the script's text and the shell files of a plan.

    Launchers that start processes on other machines must hand these on: a node without them would run something else.
    """
    texts = [*launch.prepare, launch.script, launch.arguments]
    texts += [text for name, text in files.items() if name.endswith(".sh")]
    names = dict.fromkeys(match[1] for text in texts for match in _SETTABLE.finditer(text))
    return tuple(name for name in names if name not in {needed.name for needed in needed_variables(launch)})


def job_name(document: PlanDocument) -> str:
    """A name that Slurm, Kubernetes (RFC 1035 label) and SkyPilot all take; it depends on the plan alone."""
    return "plan-" + (_NOT_IN_NAMES.sub("", document.id.lower())[:12] or "0")


def cores(cluster: Cluster) -> int:
    """CPU cores that belong to the job's GPUs of a node."""
    return max(1, cluster.host_cores_per_node * cluster.local_gpus // cluster.gpus_per_node)


def host_memory_gib(cluster: Cluster) -> int:
    """Host memory that belongs to the job's GPUs of a node, in GiB."""
    return max(1, cluster.host_memory_bytes_per_node * cluster.local_gpus // cluster.gpus_per_node // GIB)


def launch_script(
    document: PlanDocument, launch: Launch, hosts: Sequence[str], *, given: bool = True, modules: bool = False
) -> str:
    """``launch.sh``: the same script on every node.

    ``given`` says whether ``hosts`` are real names and not placeholders, ``modules`` whether training scripts import
    Python files that lie beside it.
    """
    head_node = shlex.quote(hosts[0]) if given else ""
    return fill(launch.template, _script_context(document, launch, head_node, modules))


def _script_context(document: PlanDocument, launch: Launch, head_node: str, modules: bool) -> dict[str, Any]:
    """What the templates of launch scripts are filled with."""
    cluster = document.request.cluster
    return {
        "title": one_line(document.request.model.name),
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.local_gpus,
        "head_node": head_node,
        "port": RENDEZVOUS_PORT,
        "job_id": job_name(document),
        "variables": launch.variables,
        "modules": modules,
        "prepare": launch.prepare,
        "script": launch.script,
        "arguments": launch.arguments,
    }


def deepspeed_scripts(
    document: PlanDocument, launch: Launch, hosts: Sequence[str], *, given: bool, modules: bool = False
) -> LauncherFiles:
    """``launch_deepspeed.sh``; for several nodes the ``hostfile`` it reads and the variables that it copies to them,
    too."""
    cluster = document.request.cluster
    context = _script_context(document, launch, shlex.quote(hosts[0]), modules)
    script = fill("launch/deepspeed.sh.j2", context)
    name = "launch_deepspeed.sh"
    start = Start("With DeepSpeed's own launcher", f"./{name}", log="The ranks print to this terminal.")
    if cluster.nodes == 1:
        told = {name: "starts the job with DeepSpeed's launcher"}
        return LauncherFiles({name: script}, told, start)
    told = {
        name: "starts the job with DeepSpeed's launcher, from the first node",
        "hostfile": "the nodes for it" + ("" if given else "; the names are placeholders"),
        ".deepspeed_env": "the variables it copies to the other nodes",
    }
    files = {
        name: script,
        "hostfile": "".join(f"{host} slots={cluster.local_gpus}\n" for host in hosts),
        ".deepspeed_env": "".join(f"{variable.name}={variable.value}\n" for variable in launch.variables),
    }
    before = ["On the first node only; it reaches the others with pdsh over ssh."]
    if not given:
        before.insert(0, "Put your host names into `hostfile`, the leading one first.")
    return LauncherFiles(files, told, Start(start.heading, start.command, tuple(before), start.log))
