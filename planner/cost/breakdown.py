"""Named trees of one strategy's time and memory: every parent is the sum or the maximum of its children.

The leaves are the very arrays that ``Step`` adds up into coefficients; the roots equal ``assemble``'s figures.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.cost.activations import final_norm_bytes
from planner.cost.stage_model import StageResult
from planner.cost.step import Step
from planner.cost.workspace import WORKSPACES
from planner.specs.batch import FloatArray, IntArray
from planner.specs.plan import Breakdown

_TEXT = {
    "weights": "bytes per parameter of the framework's memory layout",
    "gradients": "bytes per parameter of the framework's memory layout",
    "optimizer": "bytes per parameter of the framework's memory layout",
}


def leaf(name: str, value: float, source: str) -> Breakdown:
    return Breakdown(name=name, value=float(value), source=source)


def total(name: str, children: Iterable[Breakdown]) -> Breakdown:
    """A parent that is the sum of its children; children of no weight are left out."""
    kept = tuple(child for child in children if child.value != 0.0)
    return Breakdown(name=name, value=sum(child.value for child in kept), combine="sum", children=kept)


def largest(name: str, children: Iterable[Breakdown]) -> Breakdown:
    kept = tuple(children)
    return Breakdown(name=name, value=max(child.value for child in kept), combine="max", children=kept)


def time_tree(step: Step, result: StageResult, layers: IntArray, recomputed: IntArray, offload: float) -> Breakdown:
    """Seconds of one step, by what a rank does and waits for; the candidate is row 0."""
    slow, model = step.straggler, step.model
    ranks = result.rank_time_s[0] / slow
    slowest = int(ranks.argmax())
    m = float(step.work.micro_batches[0])
    tail_rank = int(result.rank_tail_s[0].argmax())
    bubble = float(result.pipeline_time_s[0] - model.p2p_time_s[0]) / slow - m * ranks[slowest]
    body = [
        total(
            f"stage {slowest} x {m:.0f} micro-batches" if step.pp > 1 else f"{m:.0f} micro-batches",
            _scaled(m, _stage_terms(step, slowest, layers[0, slowest], recomputed[0, slowest])),
        ),
        leaf("pipeline bubble", bubble, "fill and drain: bubble factor x the other stages' micro-batch time")
        if bubble >= 0.0
        else leaf("cores of waiting stages", bubble, "faster than the slowest stage: the others leave it their cores"),
        leaf(
            "stage-to-stage traffic",
            model.p2p_time_s[0] / slow,
            "2 N h / B per boundary and direction, as far as exposed",
        ),
        *_tail(step, result, layers, offload, tail_rank),
        leaf("once a step", step.constant_time[0], "gradient norm, logging, host synchronisation"),
    ]
    waited = float(result.step_time_s[0]) * (1.0 - 1.0 / slow)
    return total(
        "step time", [*body, leaf("waiting for the slowest GPU", waited, "share per doubling of the GPU count")]
    )


def _scaled(factor: float, parts: Iterable[Breakdown]) -> list[Breakdown]:
    return [part.model_copy(update={"value": part.value * factor}) for part in parts]


def _stage_terms(step: Step, rank: int, layers: IntArray, recomputed: IntArray) -> list[Breakdown]:
    """What one rank does in one micro-batch, all its layers together, plus what its end of the pipeline adds."""
    sums: dict[str, tuple[float, str]] = {}

    def add(name: str, value: float, source: str) -> None:
        sums[name] = (sums.get(name, (0.0, ""))[0] + value, source)

    for k, layer in enumerate(step.layers):
        count = float(layers[k])
        for term in layer.terms:
            add(term.name, count * float(term.forward[0] + term.backward[0]), term.source)
        plain = float((layer.forward() + layer.backward())[0])
        add(
            "kernel launches",
            count * (float(layer.total()[0]) - plain),
            "launch-bound: kernels x host time, beyond the GPU's work",
        )
        exposed = float(step.layer_time_s[0, k] - layer.total()[0])
        add(
            "parameter and gradient traffic",
            count * exposed,
            "sharded weights gathered and scattered in every micro-batch",
        )
        add(
            "recomputation",
            float(recomputed[k]) * float(step.recompute_time_s[0, k]),
            "forward work repeated in backward",
        )
    ends = ([step.first_time] if rank == 0 else []) + ([step.last_time] if rank == step.pp - 1 else [])
    for end in ends:
        for term in end.terms:
            add(term.name, float(term.forward[0] + term.backward[0]), term.source)
    model, slow = step.model, step.straggler
    if rank == 0:
        add(
            "parameter and gradient traffic",
            float(model.first_time_s[0] / slow - step.first_time.total()[0]),
            "as above",
        )
    if rank == step.pp - 1:
        add(
            "parameter and gradient traffic", float(model.last_time_s[0] / slow - step.last_time.total()[0]), "as above"
        )
    return [leaf(name, value, source) for name, (value, source) in sums.items()]


def _tail(step: Step, result: StageResult, layers: IntArray, offload: float, rank: int) -> list[Breakdown]:
    """What follows the last backward pass on the rank that ends last."""
    model, slow = step.model, step.straggler

    def on_rank(per_layer: FloatArray, first: FloatArray, last: FloatArray) -> float:
        value = float(layers[0, rank] @ per_layer[0])
        value += float(first[0]) if rank == 0 else 0.0
        return (value + (float(last[0]) if rank == step.pp - 1 else 0.0)) / slow

    optimizer = on_rank(model.layer_optimizer_time_s, model.first_optimizer_time_s, model.last_optimizer_time_s)
    host = offload * on_rank(model.layer_offload_time_s, model.first_offload_time_s, model.last_offload_time_s)
    exposed = float(result.rank_tail_s[0, rank]) / slow - optimizer - host
    return [
        leaf("exposed gradient traffic", exposed, "once-a-step reduction and gather, less what hides behind compute"),
        leaf("optimizer", optimizer, "38 bytes per updated parameter over memory bandwidth"),
        leaf("host optimizer", host, "30 bytes per parameter over DRAM, gradients and parameters over the host link"),
    ]


def memory_tree(step: Step, layers: IntArray, recomputed: IntArray, offload: float) -> Breakdown:
    """Bytes of every pipeline stage in every phase; the worst stage and phase is the peak."""
    stages = [_stage_memory(step, rank, layers[0, rank], recomputed[0, rank], offload) for rank in range(step.pp)]
    return largest("peak memory", stages)


def _stage_memory(step: Step, rank: int, layers: IntArray, recomputed: IntArray, offload: float) -> Breakdown:
    states = _state_leaves(step, rank, layers, offload)
    activations = _activation_leaves(step, rank, layers, recomputed)
    last = rank == step.pp - 1
    standing = step.standing(step.last_buffers if last else step.buffers)
    libraries = leaf(WORKSPACES, standing.pop(WORKSPACES)[0], "scratch memory of matrix libraries")
    buffers = [leaf(name, value[0], "framework buffer") for name, value in standing.items()]
    again = step.recomputed_layer[0]
    running = [
        leaf(
            "backward of one layer",
            step.layer_transient[0] - again,
            "activation gradients alive at once, and the layer's own buffers",
        ),
        leaf("recomputed layer", again, "saved tensors of one layer, back for its backward pass"),
    ]
    if last:
        loss = leaf("logits and loss", step.loss_transient[0], "bytes per logit x tokens x vocabulary / tp")
        logits = [
            *([loss] if step.loss_transient[0] >= step.layer_transient[0] else running),
            leaf(
                "final norm",
                final_norm_bytes(step.work)[0],
                "input and output",
            ),
            leaf("prediction blocks", step.prediction_bytes[0], "one more layer's saved tensors and its joint input"),
        ]
    else:
        logits = running
    forward = _phase(
        step,
        "forward and backward",
        [*states, total("activations", activations), *logits, total("buffers", buffers), libraries],
    )
    temporary = float(layers @ step.model.step_temporary_layer_bytes[0])
    update = _phase(
        step, "optimizer step", [*states, leaf("optimizer temporaries", temporary, "framework's update kernels")]
    )
    return largest(f"stage {rank}", [forward, update])


def _state_leaves(step: Step, rank: int, layers: IntArray, offload: float) -> list[Breakdown]:
    parts = [(float(layers[k]), weights) for k, weights in enumerate(step.weights)]
    parts += [(1.0, step.ends.first)] if rank == 0 else []
    parts += [(1.0, step.ends.last)] if rank == step.pp - 1 else []

    def bytes_of(part: str) -> float:
        return sum(count * float(step.held(weights, part)[0]) for count, weights in parts)

    values = {"weights": bytes_of("weights"), "gradients": bytes_of("gradients"), "optimizer": bytes_of("optimizer")}
    # What a framework moves to the host are the optimizer states, then gradients, then weights.
    left = offload * bytes_of("offloadable")
    for part in ("optimizer", "gradients", "weights"):
        gone = min(left, offload * values[part])
        values[part] -= gone
        left -= gone
    copies = sum(count * float(step.gathered(weights)[0]) for count, weights in parts)
    copies = min(copies, values["weights"])
    values["weights"] -= copies
    leaves = [leaf(name, value, _TEXT[name]) for name, value in values.items()]
    return [*leaves, *([leaf("gathered weights", copies, _TEXT["weights"])] if copies else [])]


def _activation_leaves(step: Step, rank: int, layers: IntArray, recomputed: IntArray) -> list[Breakdown]:
    alive = float(step.model.in_flight[0, rank])
    sums: dict[str, float] = {}
    for k, tensors in enumerate(step.tensors):
        for name, value in tensors.items():
            sums[name] = sums.get(name, 0.0) + alive * float(layers[k]) * float(value[0])
    saved = alive * float(recomputed @ step.recompute_saved_bytes[0])
    leaves = [
        leaf(name.replace("_", " "), value, f"saved tensor x {alive:.3g} micro-batches in flight")
        for name, value in sums.items()
    ]
    if rank == 0:
        leaves.append(leaf("token ids", alive * float(step.model.first_activation_bytes[0]), "8 bytes a token"))
    return [*leaves, leaf("recomputed instead", -saved, "not kept")]


def _phase(step: Step, name: str, parts: list[Breakdown]) -> Breakdown:
    allocated = sum(part.value for part in parts)
    factor = float(step.model.memory_factor[0])
    return total(
        name,
        [
            *parts,
            leaf("fragmentation", (factor - 1.0) * allocated, "reserved over allocated"),
            leaf("context and communication buffers", step.device_overhead[0], "CUDA context, libraries, NCCL"),
        ],
    )
