"""A plan for Megatron-Bridge: the arguments of Megatron-LM as dotted overrides of a recipe, and the script that takes
them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.backends.bridge_fields import LISTS, PRECISION, RECIPE, RECIPE_SWITCHES, SWITCHES, VALUES
from planner.errors import InputError
from planner.render import megatron
from planner.render.bundle import Bundle
from planner.render.engine import fill
from planner.render.launch import Launch
from planner.render.megatron_model import model_flags, model_notes
from planner.render.text import Flag, one_line
from planner.render.topology import replica_ranks
from planner.specs.cluster import Cluster
from planner.specs.plan import Plan, PlanDocument
from planner.specs.strategy import Strategy

_IMPLIED = frozenset(
    {"group-query-attention", "max-position-embeddings", "bf16", "fp16", "no-create-attention-mask-in-dataloader"}
)
"""Arguments that other fields say, or that are Megatron-Bridge's default (no attention mask from the data set)."""

_MENTIONED = {
    "rotary-base": "model.rotary_base",
    "moe-router-topk-scaling-factor": "model.moe_router_topk_scaling_factor",
}
"""Arguments that the guide speaks of and no plan sets."""

OVERRIDES_FILE = "bridge_overrides.txt"


def build(document: PlanDocument, plan: Plan) -> Bundle:
    """Files, launch data and advice for Megatron-Bridge."""
    request, strategy = document.request, plan.strategy
    accelerator = request.cluster.accelerator
    arguments = {
        "title": one_line(request.model.name),
        "gpus": strategy.gpus,
        "recipe": RECIPE,
        "model": [
            *overrides(model_flags(request.model, strategy.seq_len)),
            f"model.vocab_size={request.model.vocab}",
            "model.should_pad_vocab=True",
            f"tokenizer.vocab_size={request.model.vocab}",
            f"dataset.seq_length={strategy.seq_len}",
        ],
        "parallel": overrides(megatron.parallel_flags(request.model, strategy, request.cluster)) + _unsharded(strategy),
        "train": _precision(strategy)
        + overrides(
            [
                *megatron.batch_flags(strategy),
                *megatron.precision_flags(strategy, accelerator),
                *megatron.optimizer_flags(strategy),
                *megatron.kernel_flags(request.job, request.model),
            ],
            switched_off=RECIPE_SWITCHES,
        ),
    }
    return Bundle(
        files={
            OVERRIDES_FILE: fill("bridge/bridge_overrides.txt.j2", arguments),
            "pretrain_bridge.py": fill("bridge/pretrain_bridge.py.j2", arguments),
        },
        launch=Launch(
            script="pretrain_bridge.py",
            arguments=f'{OVERRIDES_FILE} "$@"',
            variables=megatron.environment(strategy, accelerator),
        ),
        topology=replica_ranks(strategy, request.cluster),
        expert_topology=megatron.expert_topology(strategy, request.cluster) if request.model.moe is not None else None,
        notes=tuple(_respelt(note) for note in model_notes(request.model)),
        files_told={
            OVERRIDES_FILE: "every setting of the plan, as section.field=value",
            "pretrain_bridge.py": "the recipe with these settings; refuses a field that does not exist",
        },
        setup=_setup(request.cluster, strategy),
        watch=megatron.WATCH,
        out_of_memory=tuple(_respelt(line) for line in megatron.out_of_memory(request.model, strategy)),
    )


def overrides(flags: Iterable[Flag], *, switched_off: Iterable[str] = ()) -> list[str]:
    """Dotted overrides that say what these arguments say; switches in ``switched_off`` that are absent are cleared."""
    lines, given = [], set()
    for flag in flags:
        name, values = flag.words[0].removeprefix("--"), flag.words[1:]
        given.add(name)
        lines += _override(name, values)
    cleared = (SWITCHES[name] for name in switched_off if name not in given)
    return lines + [f"{field}={not value}" for field, value in cleared]


def _override(name: str, values: tuple[str, ...]) -> list[str]:
    if name in _IMPLIED:
        return []
    if name == "swiglu":
        return ["model.activation_func=silu", "model.gated_linear_unit=True"]
    if name == "squared-relu":
        return ["model.activation_func=squared_relu"]
    if name == "use-distributed-optimizer":
        return ["ddp.use_distributed_optimizer=True", "optimizer.use_distributed_optimizer=True"]
    if name == "moe-layer-freq":
        return [f"model.moe_layer_freq={values[0].replace(' ', '')}"]
    if name in SWITCHES:
        field, value = SWITCHES[name]
        return [f"{field}={value}"]
    if name in LISTS:
        items = values if len(values) > 1 or name != "window-size" else tuple(values[0].split(","))
        return [f"{LISTS[name]}=[{','.join(items)}]"]
    if name in VALUES:
        return [f"{VALUES[name]}={values[0]}"]
    raise InputError("this argument has no field in Megatron-Bridge", where=f"--{name}", got=" ".join(values))


def _unsharded(strategy: Strategy) -> list[str]:
    """The recipe's optimizer is sharded unless both sections say that it is not."""
    if strategy.zero_stage:
        return []
    return ["ddp.use_distributed_optimizer=False", "optimizer.use_distributed_optimizer=False"]


def _precision(strategy: Strategy) -> list[str]:
    base = PRECISION[strategy.precision if strategy.precision in PRECISION else "bf16"]
    lines = [f"mixed_precision={base}"]
    # Without a mixed-precision recipe the sections keep their own formats.
    return lines if base != "None" else [*lines, "model.bf16=False", "optimizer.bf16=False"]


def _setup(cluster: Cluster, strategy: Strategy) -> tuple[str, ...]:
    needed = (
        "Install megatron-bridge 0.6 (with megatron-core 0.19 and Transformer Engine) on every node, for example "
        "NVIDIA's NeMo container.",
        "Nothing else is needed for the first run: the recipe trains on mock data; set `dataset.blend` and the "
        "tokenizer for your own.",
    )
    return (*needed, *(_respelt(line) for line in megatron.setup(cluster, strategy)[2:]))


def _respelt(text: str) -> str:
    """Advice with fields in place of arguments."""

    def field(found: re.Match[str]) -> str:
        name, after = found[1], found[2]
        if name in SWITCHES:
            where, value = SWITCHES[name]
            return f"{where}={value}{after}"
        where = VALUES.get(name) or LISTS.get(name) or _MENTIONED.get(name, "")
        if not where:
            return found[0]
        # A value follows after a space; a quotation mark ends the mention of a field.
        return f"{where}=" if after == " " else f"{where}{after}"

    return re.sub(r"--([a-z][a-z0-9-]*)([ `])", field, text)
