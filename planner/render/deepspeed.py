"""A plan as ``ds_config.json`` and the small Python part that DeepSpeed keeps out of its configuration.

The pipeline, Ulysses sequence parallelism and recomputation have no JSON key that acts by itself: they live in
``parallel_setup.py``, which a training script imports.
"""

from __future__ import annotations

import json
from typing import Any

from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS, one_line
from planner.render.topology import Axis, Topology
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy

NVME_FOLDER = "/local_nvme"
"""Placeholder for the folder on a node's own NVMe drive."""


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for DeepSpeed."""
    request, strategy = document.request, plan.strategy
    config = ds_config(request.model, request.job, strategy)
    setup_text = fill("deepspeed/parallel_setup.py.j2", setup_context(request.model, strategy))
    return Bundle(
        files={"ds_config.json": json.dumps(config, indent=2) + "\n", "parallel_setup.py": setup_text},
        launch=Launch(
            script='"${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script, which imports parallel_setup.py}"',
            arguments='"$@"',
            variables=(EXPANDABLE_SEGMENTS,),
        ),
        topology=topology(strategy, request.cluster),
        files_told={
            "ds_config.json": "DeepSpeed's configuration",
            "parallel_setup.py": "what lives in code instead: import it in your training script",
        },
        setup=setup_steps(strategy),
        watch=WATCH,
        out_of_memory=out_of_memory(strategy),
        notes=notes(strategy),
    )


WATCH = (
    "The step time (`engine.tput_timer` prints samples per second every `steps_per_print` steps), from the tenth step on, against the "
    "estimate.",
    "`torch.cuda.max_memory_reserved()` against the estimated peak; the warning `pytorch allocator cache flushes` must not appear.",
    "Host memory (`free -g`) when anything is offloaded.",
    "The loss: it must fall on real data. With fp16, skipped steps (`OVERFLOW`) must stop after some tens of steps.",
)


def ds_config(model: ModelSpec, job: Job, strategy: Strategy) -> dict[str, Any]:
    """DeepSpeed's configuration.

    The total batch is left out: with AutoTP alone DeepSpeed counts every rank as a replica and would refuse the true value.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.grad_accum,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1.5e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        **precision_section(strategy),
    }
    return config


def precision_section(strategy: Strategy) -> dict[str, Any]:
    if strategy.precision == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    if strategy.precision == "bf16":
        return {"bf16": {"enabled": True}}
    return {}


def setup_context(model, strategy): return {}
def setup_steps(strategy): return ()
def out_of_memory(strategy): return ()
def notes(strategy): return ()
def topology(strategy: Strategy, cluster: Cluster) -> Topology:
    return Topology((Axis("tp", strategy.tp, "x"),), cluster.local_gpus)
