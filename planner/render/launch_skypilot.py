"""SkyPilot: a task that finds machines on a cloud or a cluster and runs ``launch.sh`` on each of them.

Fields of the task file and names of accelerators as of SkyPilot 0.14 (``sky/utils/schemas.py``) and its catalogue
(skypilot-catalog, ``catalogs/v8/common/accelerators.csv``).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.render.engine import fill
from planner.render.launch import Launch, LauncherFiles, Start, cores, job_name, needed_variables
from planner.render.launch_kubernetes import quoted
from planner.render.text import one_line
from planner.specs.plan import PlanDocument

SKYPILOT_FILE = "skypilot.yaml"

ACCELERATORS = {
    "a100-pcie-40gb": "A100",
    "a100-pcie-80gb": "A100-80GB",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a10g": "A10G",
    "a40": "A40",
    "a800-sxm-80gb": "A800",
    "b200-sxm-180gb": "B200",
    "gh200-96gb": "GH200",
    "h100-nvl-94gb": "H100-NVL",
    "h100-pcie-80gb": "H100",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "rtx-6000-ada": "RTX6000-Ada",
    "rtx-a6000": "RTXA6000",
    "rtx-pro-6000-blackwell": "RTXPRO6000",
    "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}
"""Our accelerator -> the name that most clouds of SkyPilot's catalogue give it.  One name covers PCIe and SXM cards."""


def skypilot_files(document: PlanDocument, launch: Launch, optional: Sequence[str]) -> LauncherFiles:
    """``skypilot.yaml``; what the user must set stands in ``envs`` without a value, which SkyPilot then asks for."""
    cluster, name = document.request.cluster, job_name(document)
    needed = needed_variables(launch)
    accelerator, on_cores = ACCELERATORS.get(cluster.accelerator.id), cluster.accelerator.synchronous
    text = fill(
        "launch/skypilot.yaml.j2",
        {
            "title": one_line(document.request.model.name),
            "name": quoted(name),
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.local_gpus,
            "cpus": cores(cluster) if on_cores else 0,
            "known": accelerator is not None,
            "accelerator_id": one_line(cluster.accelerator.id),
            "accelerator": quoted(accelerator or cluster.accelerator.id.split("-")[0].upper()),
            "needed": [{"name": variable.name, "why": variable.why} for variable in needed],
        },
    )
    command = f"sky launch -c {name} {SKYPILOT_FILE}"
    command += "".join(f' --env {variable.name}="${variable.name}"' for variable in needed)
    before = ["Complete `setup` in the file: it installs the framework on every node."]
    if needed:
        before.append("Set " + ", ".join(f"`{variable.name}`" for variable in needed) + " as on the machines.")
    if optional:
        names = ", ".join(f"`{name}`" for name in optional)
        before.append(f"The machines see none of your variables: give {names} with `--env`, too, where you set them.")
    if accelerator is None and not on_cores:
        before.append("Replace the accelerator's name in the file: SkyPilot's catalogue has none for this one.")
    start = Start(
        "With SkyPilot, from this folder",
        command,
        tuple(before),
        f"`sky logs {name}` follows all nodes; `sky down {name}` gives the machines back.",
    )
    return LauncherFiles(
        {SKYPILOT_FILE: text}, {SKYPILOT_FILE: "a SkyPilot task that runs launch.sh on every node"}, start
    )
