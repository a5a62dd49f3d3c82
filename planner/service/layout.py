"""From a stated strategy to the one-row batch that the cost model evaluates, with the framework's rules checked.

What is not stated becomes the framework's usual choice and is returned as an assumption; a broken rule is an InputError
with the rule's reason, its equation and what would be allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np

from planner.backends.base import Backend, RecomputeKind
from planner.backends.rule_kit import divisors
from planner.cost.evaluate import CostContext
from planner.errors import InputError
from planner.search.legality import refusals
from planner.service.inputs import checked_int, one_of
from planner.service.requests import StrategyInput
from planner.specs.batch import DEVICES, EVERY_LAYER, SCHEDULES, StrategyBatch
from planner.specs.plan import Assumption
from planner.specs.problems import named_in, shown
from planner.specs.strategy import RecomputeMode

MAX_DEGREE = 1_000_000
_FIELDS = tuple(field.name for field in fields(StrategyInput))
MAX_STAGES = 10_000
"""pp * vpp cannot exceed the layers of the largest model spec."""


@dataclass(frozen=True)
class ResolvedLayout:
    batch: StrategyBatch
    """One row."""
    assumptions: tuple[Assumption, ...]


def resolve_layout(given: StrategyInput, context: CostContext) -> ResolvedLayout:
    """The stated strategy as a batch of one, legal for the backend."""
    backend, cluster = context.backend, context.cluster
    assumptions: list[Assumption] = []

    def take(field: str, value: Any, fallback: Any, why: str) -> Any:
        if value is not None:
            return value
        assumptions.append(Assumption(field=f"strategy.{field}", value=fallback, why=why))
        return fallback

    tp, pp, cp = (_degree(getattr(given, name), name) for name in ("tp", "pp", "cp"))
    vpp, ep, micro_batch = (_degree(getattr(given, name), name) for name in ("vpp", "ep", "micro_batch"))
    dp = _replicas(tp, pp, cp, cluster.gpus)
    sequence_parallel = given.sequence_parallel
    if tp > 1:
        possible = True in backend.sequence_parallel_choices
        sequence_parallel = take(
            "sequence_parallel", sequence_parallel, possible, f"usual for tp > 1 with {backend.title}"
        )
    zero_stage = take("zero_stage", given.zero_stage, _usual_zero(backend, pp, dp * cp), f"usual with {backend.title}")
    checked_int(zero_stage, "--zero-stage", 0, 3)
    degrees = backend.shard_degrees(cluster, tp, cp, dp, zero_stage)
    shard = given.shard_degree if given.shard_degree is not None else (degrees or (1,))[0]
    etp = given.etp
    if context.model.moe is not None and tp > 1 and backend.expert_degrees:
        etp = take("etp", etp, 1, "experts are small; splitting them over tp ranks rarely pays")
    kind, recomputed = recompute_choice(given.recompute, backend.recompute_kinds(context.model, context.job))
    offload = _offload(given.offload, backend, zero_stage)
    batch = one_row(
        tp=tp,
        sequence_parallel=bool(sequence_parallel),
        cp=cp,
        pp=pp,
        vpp=vpp,
        schedule=_schedule(given.schedule, backend, pp, vpp),
        ep=ep,
        etp=_degree(etp if etp is not None else 1, "etp"),
        dp=dp,
        zero_stage=zero_stage,
        shard_degree=_degree(shard, "shard_degree"),
        secondary_shard_degree=0
        if given.secondary_shard_degree is None
        else checked_int(given.secondary_shard_degree, "--secondary-shard-degree", 2, MAX_DEGREE),
        micro_batch=micro_batch,
        recompute_kind=kind,
        recompute_layers=recomputed,
        stage_layers=_stages(given.layers_per_stage, context, pp, vpp),
        **offload,
    )
    check_rules(context, batch)
    return ResolvedLayout(batch, tuple(assumptions))


def one_row(*, stage_layers: tuple[int, ...], **values: Any) -> StrategyBatch:
    """A batch of one from scalars."""
    kinds: dict[str, Any] = {"sequence_parallel": np.bool_, "offload_optimizer": np.float64}
    columns = {name: np.array([value], dtype=kinds.get(name, np.int64)) for name, value in values.items()}
    return StrategyBatch(stage_layers=np.array([stage_layers], dtype=np.int64), **columns)


def check_rules(context: CostContext, batch: StrategyBatch) -> None:
    """Refuse a one-row batch that breaks a rule of its backend, quoting the first."""
    broken = refusals(context, batch)
    if broken:
        name, rule, equation = context.backend.name, broken[0].rule, broken[0].equation
        options = ["--" + field.replace("_", "-") for field in named_in(equation, _FIELDS)]
        raise InputError(
            f"{rule.reason} [rule {rule.id}, {rule.source}]",
            where=", ".join(options) or name,
            got=equation,
            allowed=broken[0].allowed,
            hint=f"change {' or '.join(options) or 'the strategy'}, or let `planner suggest --backend {name}` choose",
        )


def _degree(value: int, name: str) -> int:
    return checked_int(value, "--" + name.replace("_", "-"), 1, MAX_DEGREE)


def _replicas(tp: int, pp: int, cp: int, gpus: int) -> int:
    product = tp * pp * cp
    if gpus % product:
        raise InputError(
            f"gpus({gpus}) % (tp({tp}) * pp({pp}) * cp({cp})) = {gpus % product}, must be 0: the replicas",
            where="--tp, --pp, --cp",
            got=f"tp * pp * cp = {product}",
            allowed=f"a divisor of {gpus}: {', '.join(map(str, divisors(gpus)[:16]))}",
            hint="change one of the degrees or --gpus",
        )
    return gpus // product


def _usual_zero(backend: Backend, pp: int, ranks: int) -> int:
    """The stage people run: distributed optimizer (Megatron), full sharding (FSDP), ZeRO-3 or (in a pipeline) 1."""
    if ranks == 1:
        return min(backend.zero_stages)
    usual = {"megatron": 1, "fsdp": 3, "deepspeed": 1 if pp > 1 else 3}.get(backend.name, max(backend.zero_stages))
    return usual if usual in backend.zero_stages else max(backend.zero_stages)


def _schedule(given: str | None, backend: Backend, pp: int, vpp: int) -> int:
    possible = backend.schedules(pp, vpp)
    if not possible:
        raise InputError(
            f"{backend.title} has no pipeline schedule for pp({pp}) and vpp({vpp})",
            where="--vpp" if vpp > 1 else "--pp",
            got=f"pp={pp}, vpp={vpp}",
            hint="use --vpp 1" if vpp > 1 else "use --pp 1",
        )
    return SCHEDULES.index(one_of(given, "--schedule", possible) if given is not None else possible[0])


def recompute_choice(text: str, kinds: tuple[RecomputeKind, ...]) -> tuple[int, int]:
    """(index of the kind, recomputed layers of each virtual stage) of ``--recompute``; InputError with the choices."""
    mode, _, detail = text.partition(":")
    one_of(mode, "--recompute", get_args(RecomputeMode))
    modules = tuple(sorted(part.strip() for part in detail.split(",") if part.strip())) if mode == "selective" else ()
    matching = [i for i, kind in enumerate(kinds) if kind.mode == mode]
    if mode == "selective" and modules:
        matching = [i for i in matching if tuple(sorted(kinds[i].modules)) == modules]
    layers = 0 if mode == "none" else EVERY_LAYER
    if mode == "full" and detail:
        if not re.fullmatch(r"[0-9]{1,5}", detail):
            raise InputError(
                "the number of recomputed layers cannot be read",
                where="--recompute",
                got=shown(text),
                allowed="full, or full:N with N layers of each stage",
                hint="for example --recompute full:4",
            )
        layers = int(detail)
        matching = [i for i in matching if kinds[i].layer_count]
    if not matching:
        raise InputError(
            "the framework cannot recompute this way for this model",
            where="--recompute",
            got=shown(text),
            allowed=", ".join(dict.fromkeys(_spelled(kind) for kind in kinds)),
            hint="choose one of the allowed values",
        )
    return matching[0], layers


def _spelled(kind: RecomputeKind) -> str:
    if kind.mode == "selective" and kind.modules:
        return f"selective:{','.join(kind.modules)}"
    return "full or full:LAYERS" if kind.layer_count else kind.mode


def _offload(text: str, backend: Backend, zero_stage: int) -> dict[str, Any]:
    """Columns offload_optimizer, offload_device, offload_parameters."""
    match = re.fullmatch(r"(none|cpu|nvme)(?::([0-9]+(?:\.[0-9]{1,6})?))?(\+parameters)?", text)
    share = float(match[2]) if match and match[2] else 1.0
    if match is None or not 0 < share <= 1 or (match[1] == "none" and (match[2] or match[3])):
        raise InputError(
            "this offload cannot be read",
            where="--offload",
            got=shown(text),
            allowed="none, cpu, nvme, cpu:SHARE with 0 < SHARE <= 1, and +parameters behind it",
            hint="for example --offload cpu or --offload cpu+parameters",
        )
    device = match[1]
    if device == "none":
        return {"offload_optimizer": 0.0, "offload_device": 0, "offload_parameters": 0}
    parameters = device if match[3] else "none"
    choices = [
        c for c in backend.offloads if c.device == device and c.parameters == parameters and zero_stage in c.zero_stages
    ]
    if not any(abs(share * choice.steps - round(share * choice.steps)) < 1e-9 for choice in choices):
        raise InputError(
            f"{backend.title} cannot offload this way at ZeRO stage {zero_stage}",
            where="--offload",
            got=shown(text),
            allowed=_offload_choices(backend),
            hint="choose one of the allowed values, with a ZeRO stage that has it",
        )
    return {
        "offload_optimizer": share,
        "offload_device": DEVICES.index(device),
        "offload_parameters": DEVICES.index(parameters),
    }


def _offload_choices(backend: Backend) -> str:
    spelled = ["none"]
    for choice in backend.offloads:
        suffix = "+parameters" if choice.parameters != "none" else ""
        shares = f":k/{choice.steps}" if choice.steps > 1 else ""
        spelled.append(f"{choice.device}{shares}{suffix} (ZeRO {', '.join(map(str, choice.zero_stages))})")
    return "; ".join(spelled)


def _stages(text: str | None, context: CostContext, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of the pp * vpp virtual stages."""
    count, layers = checked_int(pp * vpp, "--pp, --vpp", 1, MAX_STAGES), context.model.layers
    if text is None:
        default = context.backend.default_layout(context.model, pp, vpp)
        return default if default is not None else near_even(layers, count)
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,5}", part) for part in parts):
        raise InputError(
            "these layer counts cannot be read",
            where="--layers-per-stage",
            got=shown(text),
            allowed=f"{count} whole numbers separated by commas",
            hint=f"for example --layers-per-stage {','.join(map(str, near_even(layers, count)))[:60]}",
        )
    stages = tuple(int(part) for part in parts)
    if len(stages) != count or sum(stages) != layers:
        raise InputError(
            f"{len(stages)} stages of {sum(stages)} layers, but pp({pp}) * vpp({vpp}) = {count} and layers = {layers}",
            where="--layers-per-stage",
            got=shown(text),
            allowed=f"{count} numbers that add up to {layers}",
            hint="leave the option out for the framework's own split",
        )
    return stages


def near_even(layers: int, stages: int) -> tuple[int, ...]:
    """As even as it goes, the larger stages in the middle (the ends carry embedding and head)."""
    base, more = divmod(layers, stages)
    start = (stages - more + 1) // 2
    return tuple(base + (start <= i < start + more) for i in range(stages))
