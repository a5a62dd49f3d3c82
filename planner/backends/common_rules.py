"""Rules that follow from arithmetic or from the hardware and hold for every framework; each backend lists those it
includes.

What one framework insists on, and another does not, stands in that framework's own module.
"""

from __future__ import annotations

import numpy as np

from planner.backends.base import Limit, Rule, RuleContext
from planner.backends.rule_kit import at_most, divisible, equal, input_rule, predicate, written
from planner.specs.batch import DEVICES, EVERY_LAYER, SCHEDULES, BoolArray, IntArray
from planner.specs.strategy import Schedule

ARITHMETIC = "arithmetic"
FP8_ARCHITECTURES = "Ada, Hopper, Blackwell, CDNA3 or newer"

WORLD_SIZE = equal(
    "world-size",
    ("tp", "pp", "cp", "dp"),
    ("gpus",),
    reason="Every GPU belongs to exactly one tensor, pipeline, context and data-parallel position.",
    source=ARITHMETIC,
)

BATCH_DIVISIBLE = divisible(
    "batch-divisible",
    ("global_batch",),
    ("micro_batch", "dp"),
    reason="Each data-parallel replica runs the same whole number of micro-batches in a step.",
    source=ARITHMETIC,
    vary="micro_batch",
)

STAGES_WITHIN_LAYERS = at_most(
    "stages-within-layers",
    ("pp", "vpp"),
    ("layers",),
    reason="Every virtual pipeline stage needs at least one layer.",
    source=ARITHMETIC,
    vary="pp",
)

SHARD_DEGREE_DIVIDES = divisible(
    "shard-degree-divides",
    ("dp", "cp"),
    ("shard_degree",),
    reason="Sharded states are spread over equal parts of the data- and context-parallel ranks.",
    source=ARITHMETIC,
    vary="shard_degree",
)

HEADS_OVER_TP = divisible(
    "heads-over-tp",
    ("heads",),
    ("tp",),
    reason="Tensor parallelism gives every rank the same number of attention heads.",
    source="Megatron transformer_config.py; PyTorch DTensor views of the attention heads",
    vary="tp",
)


def _expected_layers(context: RuleContext) -> IntArray:
    return np.asarray(context.batch.stage_layers.sum(axis=1), dtype=np.int64)


LAYERS_ASSIGNED = predicate(
    "layers-assigned",
    lambda c: _expected_layers(c) == c.model.layers,
    lambda c, i: f"sum(layers_per_stage) = {_expected_layers(c)[i]}, must be layers({c.model.layers})",
    reason="The pipeline stages together hold every layer exactly once.",
    source=ARITHMETIC,
)


def stages_filled(*, but_for_the_ends: bool, source: str) -> Rule:
    """Every virtual stage holds a layer; the first and the last, which hold more than layers, where they need not."""

    def holds(context: RuleContext) -> BoolArray:
        layers = context.batch.stage_layers
        stages = (context.batch.pp * context.batch.vpp)[:, None]
        place = np.arange(layers.shape[1])[None, :]
        end = but_for_the_ends & (stages > 1) & ((place == 0) | (place == stages - 1))
        filled = np.where(place < stages, layers >= np.where(end, 0, 1), layers == 0).all(axis=1)
        return np.asarray(filled & (stages[:, 0] <= layers.shape[1]), dtype=np.bool_)

    def equation(context: RuleContext, index: int) -> str:
        given = [int(size) for size in context.batch.stage_layers[index]]
        stages = written(context, index, ("pp", "vpp"))
        ends = ", the first and the last of at least 0" if but_for_the_ends else ""
        return f"layers_per_stage = {given}, must be one number of at least 1 for each of {stages} virtual stages{ends}"

    ends = " but for the first and the last, which have embedding and head," if but_for_the_ends else ""
    return predicate(
        "stages-filled",
        holds,
        equation,
        reason=f"Each of the pp * vpp virtual stages{ends} holds at least one layer, and no other stage exists.",
        source=source,
    )


STAGES_FILLED = stages_filled(but_for_the_ends=False, source=ARITHMETIC)

UNSHARDED_DEGREE = predicate(
    "unsharded-degree",
    lambda c: (c.batch.zero_stage > 0) | (c.batch.shard_degree == 1),
    lambda c, i: f"zero_stage(0) needs shard_degree = 1, got shard_degree({c.batch.shard_degree[i]})",
    reason="Without sharding (stage 0) there is no group over which states are spread.",
    source=ARITHMETIC,
)


def _offload_named(context: RuleContext) -> BoolArray:
    batch = context.batch
    share = (batch.offload_optimizer >= 0) & (batch.offload_optimizer <= 1)
    return np.asarray(share & ((batch.offload_optimizer > 0) == (batch.offload_device > 0)), dtype=np.bool_)


OFFLOAD_NAMED = predicate(
    "offload-named",
    _offload_named,
    lambda c, i: (
        f"offload share({c.batch.offload_optimizer[i]:g}) and "
        f"device({DEVICES[c.batch.offload_device[i]]}) contradict each other"
    ),
    reason="An offloaded share between 0 and 1 goes with the device that receives it.",
    source=ARITHMETIC,
)


def _recompute_counted(context: RuleContext) -> BoolArray:
    counted = np.array([kind.layer_count for kind in context.kinds], dtype=np.bool_)
    active = np.array([kind.mode != "none" for kind in context.kinds], dtype=np.bool_)
    kind, layers = context.batch.recompute_kind, context.batch.recompute_layers
    everything = layers >= context.batch.stage_layers.max(axis=1)
    return np.asarray(~active[kind] | np.where(counted[kind], layers >= 1, everything), dtype=np.bool_)


def _recompute_equation(context: RuleContext, index: int) -> str:
    kind = context.kinds[int(context.batch.recompute_kind[index])]
    need = "at least 1" if kind.layer_count else f"every layer of a stage ({EVERY_LAYER} means all)"
    return f"recompute({kind.id}) of {context.batch.recompute_layers[index]} layers per stage, must be {need}"


RECOMPUTE_LAYERS = predicate(
    "recompute-layers",
    _recompute_counted,
    _recompute_equation,
    reason="Only layer-wise recomputation takes a number of layers; the other choices act on every layer.",
    source="Megatron transformer_config.py (recompute_num_layers); torch.utils.checkpoint wrappers",
)

LEARNED_POSITIONS = at_most(
    "learned-positions",
    ("seq_len",),
    ("learned_positions",),
    reason="A learned position table has no rows beyond the length it was made for.",
    source=ARITHMETIC,
    when=lambda c: np.full(len(c.batch), c.model.position == "learned", dtype=np.bool_),
)

NUMBER_FORMAT = input_rule(
    "number-format",
    lambda c: _format_rate(c) is not None,
    lambda c: f"precision {c.job.precision} on {c.cluster.accelerator.id} ({c.cluster.accelerator.architecture})",
    reason=(
        "The accelerator multiplies matrices in the job's number format: bf16 needs Ampere or newer (and CDNA), "
        f"fp8 needs {FP8_ARCHITECTURES}, nvfp4 needs Blackwell."
    ),
    source="peak rates of the accelerator's data sheet",
)


def _format_rate(context: RuleContext) -> float | None:
    peak = context.cluster.accelerator.peak
    return {"bf16": peak.bf16, "fp16": peak.fp16, "fp8": peak.fp8, "nvfp4": peak.fp4, "fp32": peak.fp32}[
        context.job.precision
    ]


def gpu_vendor(framework: str) -> Rule:
    """Refuse accelerators on which the rendered files of this framework are not known to run."""
    return input_rule(
        "gpu-vendor",
        lambda c: c.cluster.accelerator.vendor.lower() in ("nvidia", "amd"),
        lambda c: f"accelerator {c.cluster.accelerator.id} is from vendor {c.cluster.accelerator.vendor!r}",
        reason=(
            f"The {framework} plans written here are for NVIDIA and AMD GPUs; TPU, Trainium, Gaudi and processors are "
            "not covered."
        ),
        source="scope of this backend",
        allowed="vendor in nvidia, amd",
        limit="planner",
    )


def zero_stages(stages: tuple[int, ...], reason: str, source: str, limit: Limit = "framework") -> Rule:
    """Only these sharding stages exist."""
    listed = ", ".join(str(stage) for stage in stages)
    return predicate(
        "zero-stage",
        lambda c: np.isin(c.batch.zero_stage, stages),
        lambda c, i: f"zero_stage({c.batch.zero_stage[i]}), must be one of {listed}",
        reason=reason,
        source=source,
        limit=limit,
    )


def schedule_rule(choices: dict[str, tuple[Schedule, ...]], source: str) -> Rule:
    """Which schedules go with no pipeline ("single"), a plain one ("plain") and virtual stages ("virtual")."""

    def legal(context: RuleContext) -> BoolArray:
        batch = context.batch
        sets = {name: [SCHEDULES.index(schedule) for schedule in group] for name, group in choices.items()}
        fits = {name: np.isin(batch.schedule, group) for name, group in sets.items()}
        deep = np.where(batch.vpp > 1, fits["virtual"], fits["plain"])
        return np.asarray(np.where(batch.pp > 1, deep, fits["single"]), dtype=np.bool_)

    def equation(context: RuleContext, index: int) -> str:
        batch = context.batch
        name = SCHEDULES[int(batch.schedule[index])]
        depth = "single" if batch.pp[index] == 1 else "virtual" if batch.vpp[index] > 1 else "plain"
        wanted = ", ".join(choices[depth]) or "none (no such pipeline)"
        return f"schedule({name}) with pp({batch.pp[index]}) and vpp({batch.vpp[index]}), must be {wanted}"

    return predicate(
        "schedule",
        legal,
        equation,
        reason="The pipeline schedule is one that the framework has for that many stages and chunks.",
        source=source,
    )


SEQUENCE_PARALLEL_NEEDS_TP = predicate(
    "sequence-parallel-needs-tp",
    lambda c: ~c.batch.sequence_parallel | (c.batch.tp > 1),
    lambda c, i: f"sequence_parallel(true) with tp({c.batch.tp[i]}), needs tp > 1",
    reason="Sequence parallelism splits activations over the tp ranks, and there is only one.",
    source="Megatron-LM switches it off silently; DTensor has no axis to shard over",
    vary="tp",
)

NO_EXPERT_PARALLEL = predicate(
    "no-expert-parallel",
    lambda c: (c.batch.ep == 1) & (c.batch.etp == 1),
    lambda c, i: f"{written(c, i, ('ep', 'etp'))} = {c.batch.ep[i] * c.batch.etp[i]}, must be 1",
    reason="In the plans written for this framework every rank computes all experts and only sharding spreads them.",
    source="scope of this backend",
    vary="ep",
    limit="planner",
)

NO_SECONDARY_SHARD = predicate(
    "no-secondary-shard",
    lambda c: c.batch.secondary_shard_degree == 0,
    lambda c, i: f"secondary_shard_degree({c.batch.secondary_shard_degree[i]}), must be 0",
    reason="A second, nearer parameter shard exists in DeepSpeed (hpZ) only.",
    source="DeepSpeed zero_hpz_partition_size",
)

FP8_MULTIPLE = 16
"""fp8 tensor-core instructions take operands whose dimensions are multiples of this."""


def _fp8_widths(context: RuleContext) -> dict[str, int]:
    model = context.model
    widths = {"hidden": model.hidden, "heads * head_dim": model.heads * model.head_dim}
    if any(mlp == "dense" for _, mlp in model.layer_kinds()):
        widths["ffn"] = model.ffn
    return widths


def _fp8_aligned(context: RuleContext) -> BoolArray:
    multiple = FP8_MULTIPLE * context.batch.tp
    aligned = np.all([width % multiple == 0 for width in _fp8_widths(context).values()], axis=0)
    return np.asarray(aligned | (not context.job.narrow), dtype=np.bool_)


def _fp8_equation(context: RuleContext, index: int) -> str:
    tp = int(context.batch.tp[index])
    rests = (
        f"{k}({w}) % ({FP8_MULTIPLE} * tp({tp})) = {w % (FP8_MULTIPLE * tp)}" for k, w in _fp8_widths(context).items()
    )
    return "; ".join(rests) + "; all must be 0"


def fp8_alignment(source: str) -> Rule:
    """fp8 (and nvfp4) matrices need aligned dimensions on every rank."""
    return predicate(
        "fp8-alignment",
        _fp8_aligned,
        _fp8_equation,
        reason=(
            f"fp8 and nvfp4 matrix multiplications take dimensions that are multiples of {FP8_MULTIPLE} after the "
            "tensor split."
        ),
        source=source,
        vary="tp",
    )


COMMON: tuple[Rule, ...] = (
    NUMBER_FORMAT,
    WORLD_SIZE,
    BATCH_DIVISIBLE,
    STAGES_WITHIN_LAYERS,
    LAYERS_ASSIGNED,
    SHARD_DEGREE_DIVIDES,
    UNSHARDED_DEGREE,
    OFFLOAD_NAMED,
    RECOMPUTE_LAYERS,
    LEARNED_POSITIONS,
)
"""Rules that every backend includes, beside one about filled stages."""
