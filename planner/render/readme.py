"""README.md of a rendered plan: what the plan is, what was assumed, what to check before and in the first steps.

Every number comes from the plan document; nothing is computed again here but the rank map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Start, needed_variables
from planner.render.text import one_line, table
from planner.render.topology import group_table, node_table
from planner.specs.cluster import Cluster
from planner.specs.plan import Breakdown, Plan, PlanDocument
from planner.specs.strategy import Strategy
from planner.units import BITS_PER_BYTE, GB, count, duration, gib, percent

NVIDIA_TOOLS = {"list": "nvidia-smi", "links": "nvidia-smi topo -m", "good": "NV", "bandwidth": "nccl-tests"}
AMD_TOOLS = {"list": "rocm-smi", "links": "rocm-smi --showtopo", "good": "XGMI", "bandwidth": "rccl-tests"}
"""Commands of the vendors: list GPUs, show links, what a good link is called, measure collectives."""


def readme(
    document: PlanDocument,
    plan: Plan,
    bundle: Bundle,
    title: str,
    files: Mapping[str, str],
    starts: Sequence[Start] = (),
) -> str:
    """The guide that lies beside the rendered files; ``files`` says what each of them is, ``starts`` how the job can be
    started beside ``launch.sh``."""
    cluster = document.request.cluster
    return fill(
        "readme/README.md.j2",
        {
            "model": one_line(document.request.model.name),
            "framework": title,
            "plan_id": document.id,
            "planner_version": document.planner_version,
            "cluster": cluster_line(cluster),
            "nodes": cluster.nodes,
            "verdict": verdict(plan),
            "strategy_table": table([("", "value"), *strategy_rows(plan.strategy)]),
            "estimate_table": table([("", "estimate", "range or limit"), *estimate_rows(plan)]),
            "memory_table": memory_table(plan.estimate.memory),
            "why": plan.why,
            "assumptions": [
                f"`{entry.field}` = {one_line(json.dumps(entry.value))}: {entry.why}" for entry in document.assumptions
            ],
            "warnings": document.warnings,
            "headroom": headroom(plan),
            "setup": bundle.setup,
            "watch": bundle.watch,
            "out_of_memory": bundle.out_of_memory,
            "notes": bundle.notes,
            "group_table": group_table(bundle.topology),
            "node_table": node_table(bundle.topology),
            "expert_table": group_table(bundle.expert_topology) if bundle.expert_topology else "",
            "files": files,
            "starts": starts,
            "needed": needed_variables(bundle.launch),
            "local_ranks": bundle.topology.local_ranks,
            "ranks": bundle.topology.ranks,
            "tools": AMD_TOOLS if cluster.accelerator.vendor.lower() == "amd" else NVIDIA_TOOLS,
        },
    )


def cluster_line(cluster: Cluster) -> str:
    """Machines in one phrase."""
    network = cluster.nic_bytes_per_s * BITS_PER_BYTE / GB
    return (
        f"{cluster.gpus} x {one_line(cluster.accelerator.id)}, {cluster.local_gpus} a node, "
        f"{cluster.nics_per_node} x {network:.0f} Gb/s network a node"
    )


def verdict(plan: Plan) -> str:
    """The strategy in one line."""
    s = plan.strategy
    parts = [f"{name} {degree}" for name, degree in degrees(s) if degree > 1] or ["one GPU, nothing split"]
    step, memory = duration(plan.estimate.step_time_s), gib(plan.estimate.peak_memory_bytes)
    return f"{', '.join(parts)}: {step} a step, {memory} a GPU"


def degrees(s: Strategy) -> list[tuple[str, int]]:
    """Degrees of parallelism by their short names."""
    return [("TP", s.tp), ("CP", s.cp), ("PP", s.pp), ("VPP", s.vpp), ("EP", s.ep), ("ETP", s.etp), ("DP", s.dp)]


def strategy_rows(s: Strategy) -> list[tuple[str, str]]:
    """Name and value of everything that the strategy fixes."""
    rows = [
        ("tensor parallel", f"{s.tp}" + (" with sequence parallelism" if s.sequence_parallel else "")),
        ("context parallel", f"{s.cp}"),
        ("pipeline stages", _pipeline(s)),
        ("expert parallel", f"{s.ep} (tensor parallel inside an expert: {s.etp})"),
        ("data parallel", f"{s.dp}"),
        (
            "ZeRO stage",
            f"{s.zero_stage}, "
            + (f"sharded over {s.shard_degree} GPUs" if s.shard_degree > 1 else "nothing is sharded"),
        ),
        ("micro-batch", f"{s.micro_batch} x {s.seq_len} tokens, {s.grad_accum} a step and replica"),
        ("global batch", f"{s.global_batch} sequences = {count(s.global_batch * s.seq_len)} tokens"),
        ("precision", s.precision),
        ("recomputation", _recompute(s)),
        ("offload", _offload(s)),
    ]
    if len(set(s.layers_per_stage)) > 1:
        rows.insert(3, ("layers of each stage", " ".join(map(str, s.layers_per_stage))))
    if s.secondary_shard_degree:
        rows.append(("second, nearer shard", f"{s.secondary_shard_degree} GPUs"))
    skip = {("context parallel", "1"), ("expert parallel", "1 (tensor parallel inside an expert: 1)")}
    return [row for row in rows if row not in skip]


def _pipeline(s: Strategy) -> str:
    if s.pp == 1:
        return "1"
    return f"{s.pp} x {s.vpp} chunks ({s.pipeline_schedule})" if s.vpp > 1 else f"{s.pp} ({s.pipeline_schedule})"


def _recompute(s: Strategy) -> str:
    counts = s.recompute.layers_per_stage
    if s.recompute.mode == "selective":
        return "selective: " + ", ".join(s.recompute.modules)
    if s.recompute.mode == "full" and counts is not None:
        return (
            f"full, {max(counts)} layers of a stage"
            if len(set(counts)) == 1
            else "full, layers " + " ".join(map(str, counts))
        )
    return s.recompute.mode


def _offload(s: Strategy) -> str:
    if s.offload.device == "none" and s.offload.parameters == "none":
        return "none"
    share = percent(s.offload.optimizer)
    return f"{share} of the optimizer states to {s.offload.device}, parameters to {s.offload.parameters}"


def estimate_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """What the cost model says, with ranges and limits."""
    e = plan.estimate
    low, high = e.step_time_range_s
    memory_low, memory_high = e.peak_memory_range_bytes
    rows = [
        ("step time", duration(e.step_time_s), f"{duration(low)} to {duration(high)}"),
        ("throughput", f"{count(e.tokens_per_s)} tokens/s", f"{count(e.tokens_per_s_per_gpu)} a GPU"),
        ("model FLOPs utilisation", percent(e.mfu), f"{e.model_flops_per_s_per_gpu / 1e12:.0f} TFLOP/s a GPU"),
        ("peak memory of a GPU", gib(e.peak_memory_bytes), f"{gib(memory_low)} to {gib(memory_high)}"),
        ("memory limit of a GPU", gib(e.memory_limit_bytes), "the upper end of the range must stay below"),
        ("host memory of a node", gib(e.host_memory_bytes_per_node), ""),
    ]
    if e.range_basis:
        rows.append(("ranges", "80 %", e.range_basis))
    if e.cost_per_million_tokens is not None:
        rows.append(("cost", f"{e.cost_per_million_tokens:.3f} USD", "per million tokens"))
    return rows


def memory_table(tree: Breakdown) -> str:
    """What fills the fullest GPU in its fullest phase; the trees of all stages are in plan.json."""
    path = []
    while tree.combine == "max" and tree.children:
        tree = max(tree.children, key=lambda child: child.value)
        path.append(one_line(tree.name))
    where = ", ".join(path) or "peak"
    rows = [(f"memory of a GPU ({where})", "size")]
    rows += [(one_line(part.name), gib(part.value)) for part in tree.children if part.value > 0]
    return table(rows) if len(rows) > 1 else ""


def headroom(plan: Plan) -> str:
    """How far the estimate is from the limit, as a sentence."""
    e = plan.estimate
    left = e.memory_limit_bytes - e.peak_memory_bytes
    share = percent(abs(left) / e.memory_limit_bytes)
    if left < 0:
        return (
            f"the estimate is {gib(-left)} ({share}) above the limit of {gib(e.memory_limit_bytes)}: expect it to fail."
        )
    return (
        f"the plan leaves {gib(left)} of {gib(e.memory_limit_bytes)} ({share}) free on the worst GPU. Anything "
        "else that lives on the "
        "GPU (evaluation, logging of activations, a second model) comes out of that."
    )
