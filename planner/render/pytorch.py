"""A plan as the validation run of this product: the file that every process reads, and how the processes are started.

The same run as ``planner validate``, for machines that only a scheduler reaches; its results are read back afterwards.
"""

from __future__ import annotations

import json

from planner.render.bundle import Bundle
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS
from planner.render.topology import Axis, Topology, mesh_degrees, replicas_share
from planner.specs.cluster import Cluster
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy
from planner.specs.validation import RunConfig

RUN_FILE = "run.json"
RESULTS = "results"
"""Folder of the results, beside the files unless the variable RESULTS names another."""


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for the validation run."""
    strategy, cluster = plan.strategy, document.request.cluster
    config = run_config(document, plan).model_dump(mode="json", exclude_none=True)
    return Bundle(
        files={RUN_FILE: json.dumps(config, indent=2) + "\n"},
        launch=Launch(
            script="-m planner_validate.trainer.worker",
            arguments=f'--config {RUN_FILE} --out "${{RESULTS:-{RESULTS}}}" "$@"',
            variables=() if cluster.accelerator.synchronous else (EXPANDABLE_SEGMENTS,),
        ),
        topology=topology(strategy, cluster),
        expert_topology=expert_topology(strategy, cluster) if strategy.ep > 1 else None,
        files_told={RUN_FILE: "model, job, strategy and steps, read by every process"},
        setup=setup(cluster),
        watch=WATCH,
        out_of_memory=out_of_memory(strategy),
        notes=(
            "This trains on synthetic tokens for a few steps to confirm the plan; it writes no checkpoint.",
            "Every token is routed to a fixed expert, so that all experts have the same work, as the plan assumes."
            if document.request.model.moe is not None
            else "Weights are random: only speed, memory and the correctness of the split are measured.",
        ),
    )


def run_config(document: PlanDocument, plan: Plan) -> RunConfig:
    """What every process is told."""
    cluster = document.request.cluster
    synchronous = cluster.accelerator.synchronous
    return RunConfig(
        model=document.request.model,
        cluster=cluster,
        job=document.request.job,
        strategy=plan.strategy,
        device="cpu" if synchronous else "cuda",
        threads=max(1, int(cluster.cores_per_rank)) if synchronous else 1,
    )


WATCH = (
    "What rank 0 prints: the groups of the ranks, time and loss of each step, and the folder of the results.",
    f"`rank-<r>.json` of every rank in `{RESULTS}` (or where `RESULTS` points), written at the end; "
    "`rank-<r>.failure.json` where a rank failed, `rank-<r>.phase` for what it does at the moment.",
    f"The comparison with the estimate: `planner validate plan.json --results {RESULTS}`, where the results of all "
    "ranks lie in one folder. It says what was predicted, what was measured, and what to look at first.",
)


def setup(cluster: Cluster) -> tuple[str, ...]:
    """What has to be there before the run."""
    steps = [
        'Install the planner with PyTorch on every node: `pip install "parallel-planner[validate]"`, with the PyTorch '
        "build that belongs to its GPUs.",
        f"Set `RESULTS` to a folder that may be written to (default: `{RESULTS}` beside the files; in a pod these are "
        "read-only, so name a folder on the volume)"
        + (", the same on all nodes and shared by them." if cluster.nodes > 1 else "."),
    ]
    if cluster.nodes > 1:
        steps.append(
            "Without a folder that all nodes share, copy the `rank-*.json` of every node into one folder after the run."
        )
    return tuple(steps)


def topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """Rank order of the device mesh: tensor, context, shard, replica, pipeline."""
    # Plain data parallelism shards nothing: every data rank is a copy, and so are the ranks of one sequence.
    sharded = strategy.zero_stage > 0
    replicate, shard = mesh_degrees(strategy) if sharded else (strategy.dp, 1)
    return Topology(
        (
            Axis("tp", strategy.tp, "one layer's matrices"),
            Axis("cp", strategy.cp, "one sequence"),
            Axis("dp_shard", shard, "weights, gradients and optimizer states", over="cp" if sharded else ""),
            Axis("dp_replicate", replicate, "gradients, summed over the copies", over="" if sharded else "cp"),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def expert_topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """Rank order of the expert mesh: neighbouring data ranks hold different experts."""
    copies = strategy.gpus // (strategy.etp * strategy.ep * strategy.pp)
    return Topology(
        (
            Axis("etp", strategy.etp, "one expert's matrices"),
            Axis("ep", strategy.ep, "tokens, by all-to-all"),
            Axis(
                "edp",
                copies,
                replicas_share(strategy, copies, " of the experts"),
            ),
            Axis("pp", strategy.pp, "the model's stages"),
        ),
        cluster.local_gpus,
    )


def out_of_memory(strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first; a change of the plan asks for a new estimate."""
    again = "then estimate and render again"
    advice = []
    if strategy.micro_batch > 1:
        advice.append(f"Halve the micro-batch ({strategy.micro_batch}) with `--micro-batch`, {again}.")
    if strategy.recompute.mode != "full":
        stronger = "selective" if strategy.recompute.mode == "none" else "full"
        advice.append(f"`--recompute {stronger}`, {again}.")
    if strategy.zero_stage < 3:
        advice.append(f"`--zero-stage 3`, {again}.")
    advice.append("Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`.")
    return tuple(advice)
