"""A plan as files that start the job: framework configuration, launch scripts and a guide.

``render_plan`` computes texts and touches no disk; ``write_files`` puts them into a folder, all or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from planner.backends import get_backend
from planner.errors import InputError
from planner.render import bridge, deepspeed, fsdp, megatron
from planner.render.bundle import Bundle
from planner.render.files import write_files
from planner.render.launch import checked_launcher, deepspeed_scripts, slurm_script, torchrun_script
from planner.render.readme import readme
from planner.render.text import checked_hosts
from planner.specs.plan import Plan, PlanDocument

__all__ = ["RENDERED_BACKENDS", "render_plan", "write_files"]

_BUILDERS: dict[str, Callable[[PlanDocument, Plan], Bundle]] = {
    "megatron": megatron.build,
    "deepspeed": deepspeed.build,
    "fsdp": fsdp.build,
    "megatron-bridge": bridge.build,
}

RENDERED_BACKENDS = tuple(_BUILDERS)
"""Frameworks for which files can be written."""


def render_plan(
    document: PlanDocument, *, launcher: str = "torchrun", plan: Plan | None = None, hosts: Sequence[str] = ()
) -> dict[str, str]:
    """The files of ``plan`` (the document's best by default): relative path -> text.

    ``launcher`` is torchrun, or slurm for a job script around it; ``hosts`` names the nodes, the first one leads.
    """
    if plan is not None:
        # plan.json then says what was rendered.
        document = document.model_copy(update={"best": plan})
    plan = document.best
    chosen = checked_launcher(launcher)
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
            f"tp({s.tp}) * cp({s.cp}) * pp({s.pp}) * dp({s.dp}) = {s.gpus}, but the cluster has {cluster.gpus} GPUs",
            where="plan.strategy",
        )
    names = checked_hosts(hosts, cluster.nodes)
    bundle = _BUILDERS[plan.backend](document, plan)
    files = dict(bundle.files)
    told = {
        **bundle.files_told,
        "launch.sh": "starts the job with torchrun" + (", once on every node" if len(names) > 1 else ""),
    }
    files["launch.sh"] = torchrun_script(document, bundle.launch, names)
    if chosen == "slurm":
        files["job.sbatch"] = slurm_script(document)
        told["job.sbatch"] = "a Slurm job that runs launch.sh on every node"
    if plan.backend == "deepspeed":
        files |= deepspeed_scripts(document, bundle.launch, names)
        told |= _deepspeed_told(len(names), placeholders=not hosts)
    told["plan.json"] = "the plan, its estimate, its assumptions and its alternatives"
    files["plan.json"] = json.dumps(document.to_json_dict(), indent=2) + "\n"
    files["README.md"] = readme(document, plan, bundle, get_backend(plan.backend).title, told)
    return files


def _deepspeed_told(nodes: int, *, placeholders: bool) -> dict[str, str]:
    """What the files for DeepSpeed's own launcher are."""
    if nodes == 1:
        return {"launch_deepspeed.sh": "starts the job with DeepSpeed's launcher"}
    return {
        "launch_deepspeed.sh": "starts the job with DeepSpeed's launcher, from the first node",
        "hostfile": "the nodes for it" + ("; the names are placeholders" if placeholders else ""),
        ".deepspeed_env": "the variables it copies to the other nodes",
    }
