"""A plan as files that start the job: framework configuration, launch scripts and a guide.

``render_plan`` computes texts and touches no disk; ``write_files`` puts them into a folder, all or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from planner.backends import get_backend
from planner.errors import InputError
from planner.render import accelerate, bridge, deepspeed, fsdp, megatron, nanotron, pytorch, torchtitan
from planner.render.bundle import Bundle
from planner.render.files import write_files
from planner.render.launch import (
    LauncherFiles,
    checked_launchers,
    deepspeed_scripts,
    launch_script,
    optional_variables,
)
from planner.render.launch_hosts import (
    MPIRUN_COMMAND,
    MPIRUN_FILE,
    SLURM_COMMAND,
    SLURM_FILE,
    mpirun_files,
    slurm_files,
)
from planner.render.launch_kubernetes import PYTORCHJOB_FILE, TRAINJOB_FILE, kubernetes_command, kubernetes_files
from planner.render.launch_skypilot import SKYPILOT_FILE, skypilot_files
from planner.render.readme import readme
from planner.render.settings import Setting, settings
from planner.render.text import checked_hosts
from planner.render.topology import Topology
from planner.specs.plan import Plan, PlanDocument
from planner.units import counted

__all__ = [
    "RENDERED_BACKENDS",
    "START_COMMANDS",
    "Setting",
    "plan_settings",
    "rank_grids",
    "render_plan",
    "write_files",
]

_BUILDERS: dict[str, Callable[[PlanDocument, Plan], Bundle]] = {
    "megatron": megatron.build,
    "deepspeed": deepspeed.build,
    "fsdp": fsdp.build,
    "megatron-bridge": bridge.build,
    "accelerate-fsdp": accelerate.build_fsdp,
    "accelerate-deepspeed": accelerate.build_deepspeed,
    "torchtitan": torchtitan.build,
    "nanotron": nanotron.build,
    "pytorch": pytorch.build,
}

RENDERED_BACKENDS = tuple(_BUILDERS)
"""Frameworks for which files can be written."""

START_COMMANDS: Mapping[str, str] = {
    SLURM_FILE: SLURM_COMMAND,
    TRAINJOB_FILE: kubernetes_command(TRAINJOB_FILE),
    PYTORCHJOB_FILE: kubernetes_command(PYTORCHJOB_FILE),
    SKYPILOT_FILE: f"sky launch {SKYPILOT_FILE}",
    MPIRUN_FILE: MPIRUN_COMMAND,
}
"""File of a launcher -> the shell command that starts the job, from the folder of the files."""


def render_plan(
    document: PlanDocument, *, launcher: str = "torchrun", plan: Plan | None = None, hosts: Sequence[str] = ()
) -> dict[str, str]:
    """The files of ``plan`` (the document's best by default): relative path -> text.

    ``launcher`` names how the job is started beside ``launch.sh`` (torchrun), several with commas: slurm, trainjob,
    pytorchjob, skypilot, mpirun.  ``hosts`` names the nodes, the first one leads.
    """
    if plan is not None:
        # plan.json then says what was rendered.
        document = document.model_copy(update={"best": plan})
    plan = document.best
    chosen = checked_launchers(launcher)
    if plan.backend not in _BUILDERS:
        raise InputError(
            "no files can be written for this framework",
            where="plan.backend",
            got=repr(plan.backend),
            allowed=", ".join(RENDERED_BACKENDS),
        )
    cluster = document.request.cluster
    if plan.strategy.gpus != cluster.gpus:
        s = plan.strategy
        raise InputError(
            f"tp({s.tp}) * cp({s.cp}) * pp({s.pp}) * dp({s.dp}) = {s.gpus}, "
            f"but the cluster has {counted(cluster.gpus, 'GPU')}",
            where="plan.strategy",
        )
    names = checked_hosts(hosts, cluster.nodes)
    bundle = _BUILDERS[plan.backend](document, plan)
    modules = any(name.endswith(".py") for name in bundle.files)
    given = bool(hosts)
    files = {
        **bundle.files,
        "launch.sh": launch_script(document, bundle.launch, names, given=given, modules=modules),
    }
    told = {
        **bundle.files_told,
        "launch.sh": f"starts the job with {bundle.launch.told}" + (", once on every node" if len(names) > 1 else ""),
    }
    added = [_launcher_files(name, document, bundle, names, given) for name in chosen if name != "torchrun"]
    if plan.backend == "deepspeed":
        added.append(deepspeed_scripts(document, bundle.launch, names, given=given, modules=modules))
    for one in added:
        files |= one.files
        told |= one.told
    told["plan.json"] = "the plan, its estimate, its assumptions and its alternatives"
    files["plan.json"] = json.dumps(document.to_json_dict(), indent=2) + "\n"
    files["README.md"] = readme(
        document, plan, bundle, get_backend(plan.backend).title, told, [one.start for one in added]
    )
    return files


def rank_grids(document: PlanDocument, plan: Plan) -> tuple[Topology, ...]:
    """The rank grid of ``plan`` in its framework's own order, and the one that its experts have over the same ranks."""
    bundle = _BUILDERS[plan.backend](document, plan)
    return (bundle.topology,) if bundle.expert_topology is None else (bundle.topology, bundle.expert_topology)


def plan_settings(document: PlanDocument, plan: Plan) -> dict[tuple[str, str], Setting]:
    """What the framework's own files say for ``plan``, by file and name."""
    return settings(_BUILDERS[plan.backend](document, plan).files)


def _launcher_files(
    launcher: str, document: PlanDocument, bundle: Bundle, hosts: Sequence[str], given: bool
) -> LauncherFiles:
    """What one launcher adds."""
    if launcher == "slurm":
        return slurm_files(document, bundle.launch)
    optional = optional_variables(bundle.launch, bundle.files)
    if launcher == "skypilot":
        return skypilot_files(document, bundle.launch, optional)
    if launcher == "mpirun":
        return mpirun_files(document, bundle.launch, optional, hosts, given=given)
    return kubernetes_files(document, bundle.launch, optional, [*bundle.files, "launch.sh"], launcher)
