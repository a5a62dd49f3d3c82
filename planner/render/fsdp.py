"""A plan as a PyTorch module: device mesh, tensor-parallel plan, checkpointing and FSDP2 for Llama-like models.

Fills the constants of ``parallelize.py`` and of the example script; the code around them is the same for every plan.
"""

from __future__ import annotations

from planner.errors import InputError
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.text import EXPANDABLE_SEGMENTS, one_line
from planner.render.topology import Axis, Topology, mesh_degrees
from planner.specs.cluster import Cluster
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy

Constant = tuple[str, str, str]
"""Name, value as Python source, remark."""

_TINY_GPUS = 8
"""More processes than this are too many to try a plan's structure on the CPUs of one machine."""


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for FSDP2."""
    strategy, model = plan.strategy, document.request.model
    names = {"title": one_line(model.name), "gpus": strategy.gpus}
    return Bundle(
        files={
            "parallelize.py": fill("fsdp/parallelize.py.j2", {**names, "constants": constants(strategy)}),
            "example_train.py": fill(
                "fsdp/example_train.py.j2",
                {**names, "dimensions": repr(example_dimensions(model)).replace("'", '"'), "tied": model.tied},
            ),
        },
        launch=Launch(script='"${TRAIN_SCRIPT:-example_train.py}"', arguments='"$@"', variables=(EXPANDABLE_SEGMENTS,)),
        topology=topology(strategy, document.request.cluster),
        files_told={
            "parallelize.py": "the plan as a module that your training script imports",
            "example_train.py": "a complete script around it, to try the plan with random tokens",
        },
        setup=setup(strategy),
        watch=WATCH,
        out_of_memory=out_of_memory(strategy),
        notes=notes(model, strategy),
    )


WATCH = (
    "The step time that the script prints, from the fifth step on, against the estimate.",
    "`torch.cuda.max_memory_reserved()` against the estimated peak, and `num_alloc_retries` of "
    "`torch.cuda.memory_stats()`, which "
    "must stay 0.",
    "The loss: it must fall on real data, and equal that of one process on the same samples.",
)


def constants(strategy: Strategy) -> list[Constant]:
    """The plan as assignments at the top of ``parallelize.py``."""
    replicate, shard = flat_mesh(strategy)
    recompute = strategy.recompute
    counts = recompute.layers_per_stage
    return [
        ("DP_REPLICATE", str(replicate), "copies of the sharded model"),
        ("DP_SHARD", str(shard), "data-parallel ranks that share one copy"),
        ("CP", str(strategy.cp), "ranks that share one sequence"),
        ("TP", str(strategy.tp), "ranks that share each matrix"),
        ("SEQUENCE_PARALLEL", str(strategy.sequence_parallel), "norms and residuals split over the TP ranks too"),
        ("LOSS_PARALLEL", str(strategy.tp > 1), "logits stay split over the TP ranks"),
        ("RESHARD_AFTER_FORWARD", str(strategy.zero_stage == 3), "free gathered weights between forward and backward"),
        ("PRECISION", f'"{strategy.precision}"', "of the matrix multiplications; gradients are reduced in fp32"),
        ("RECOMPUTE", f'"{recompute.mode}"', "none, selective or full"),
        ("RECOMPUTE_LAYERS", repr(None if counts is None else sum(counts)), "leading blocks that recompute; None: all"),
        ("CPU_OFFLOAD", str(strategy.offload.device == "cpu"), "weights, gradients and optimizer live in host memory"),
        ("SEQ_LEN", str(strategy.seq_len), ""),
        ("MICRO_BATCH", str(strategy.micro_batch), "sequences of one micro-batch of a replica"),
        ("GRAD_ACCUM", str(strategy.grad_accum), f"micro-batches of a step; {strategy.global_batch} sequences in all"),
    ]


def flat_mesh(strategy: Strategy) -> tuple[int, int]:
    """``mesh_degrees`` of a strategy without pipeline and experts of their own."""
    if strategy.pp > 1 or strategy.ep > 1:
        raise InputError(
            f"parallelize.py has no pipeline or expert parallelism: pp({strategy.pp}), ep({strategy.ep})",
            where="strategy",
            allowed="pp = 1, ep = 1",
        )
    return mesh_degrees(strategy)


def example_dimensions(model: ModelSpec) -> dict[str, int] | None:
    """What the example script builds; None when the model is not a plain Llama-like one."""
    plain = (
        model.moe is None
        and model.mla is None
        and model.pattern is None
        and model.gated_mlp
        and model.position == "rope"
    )
    if not plain:
        return None
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
    }


def setup(strategy: Strategy) -> tuple[str, ...]:
    """What has to be there before the first run."""
    steps = [
        f"Install PyTorch 2.6 or newer{' and torchao' if strategy.precision == 'fp8' else ''} on every node.",
        "Import `parallelize.py` in your training script (its docstring shows the calls) and set `TRAIN_SCRIPT` "
        "to that script. "
        "Without it `example_train.py` runs.",
    ]
    # Context parallelism and CPU offload exist on GPUs only.
    if strategy.gpus <= _TINY_GPUS and strategy.cp == 1 and strategy.offload.device == "none":
        steps.append(
            f"To try the structure without GPUs: `torchrun --standalone --nproc-per-node {strategy.gpus} "
            "example_train.py --tiny`; "
            "`python example_train.py --tiny --reference` must print the same losses."
        )
    return tuple(steps)


def topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """The rank order of the device mesh: tensor, context, shard, replica, fastest first."""
    replicate, shard = flat_mesh(strategy)
    return Topology(
        (
            Axis("tp", strategy.tp, "one layer's matrices"),
            Axis("cp", strategy.cp, "one sequence"),
            Axis("dp_shard", shard, "weights, gradients and optimizer states", over="cp"),
            Axis("dp_replicate", replicate, "gradients, summed over the copies"),
        ),
        cluster.local_gpus,
    )


def notes(model: ModelSpec, strategy: Strategy) -> tuple[str, ...]:
    """What the module leaves to the training script."""
    texts = []
    if example_dimensions(model) is None:
        texts.append(
            "This model is not a plain Llama-like one: `parallelize.py` finds its blocks by their Hugging Face "
            "names, but "
            "`example_train.py` cannot build it. Call `parallelize()` from your own script."
        )
    if strategy.precision == "fp16":
        texts.append("fp16 needs loss scaling: wrap the optimizer step in `torch.amp.GradScaler`.")
    if strategy.offload.device == "cpu":
        texts.append(
            'Gradients lie in host memory: start with `init_process_group("cpu:gloo,cuda:nccl")`, as the example '
            "does, so that their "
            "norm can be reduced."
        )
    if strategy.cp > 1:
        texts.append(
            "Context parallelism replaces scaled_dot_product_attention inside `shard_sequence`: the model must "
            "call it with "
            "`is_causal=True`, and position ids must be passed in, as the example does."
        )
    return tuple(texts)


def out_of_memory(strategy: Strategy) -> tuple[str, ...]:
    """What to change first, cheapest first."""
    advice = []
    if strategy.micro_batch > 1:
        advice.append(
            f"Halve `MICRO_BATCH` ({strategy.micro_batch}) and double `GRAD_ACCUM`; the global batch stays as it is."
        )
    if strategy.recompute.mode == "none":
        advice.append('Set `RECOMPUTE = "selective"`, then `"full"`.')
    elif strategy.recompute.mode == "selective":
        advice.append('Set `RECOMPUTE = "full"`.')
    elif strategy.recompute.layers_per_stage is not None:
        advice.append("Raise `RECOMPUTE_LAYERS` (`None` recomputes every block).")
    if strategy.zero_stage < 3:
        advice.append(
            "Set `RESHARD_AFTER_FORWARD = True`: one more all-gather a layer, the gathered weights are freed."
        )
    if strategy.tp > 1 and not strategy.sequence_parallel:
        advice.append("Set `SEQUENCE_PARALLEL = True`.")
    if flat_mesh(strategy)[0] > 1:
        advice.append("Shard over more ranks: raise `DP_SHARD` and lower `DP_REPLICATE`.")
    if strategy.offload.device == "none":
        advice.append("Set `CPU_OFFLOAD = True` (slow: the optimizer runs on the host).")
    advice.append("Ask for a plan with more margin: `planner suggest ... --memory-margin 0.1`.")
    return tuple(advice)
