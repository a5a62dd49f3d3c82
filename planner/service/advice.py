"""What one change to a configuration would bring: each choice is freed in turn, everything else stays as it is.

The search that makes plans answers it, so what is advised is legal and fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace

from planner.backends import get_backend
from planner.backends.base import OffloadChoice
from planner.cost.context import CostContext
from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InputError
from planner.search.engine import search
from planner.search.outcome import Pin
from planner.search.problem import Problem
from planner.specs.check import LEAVE_OUT, Improvement
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.plan import Estimate, Plan
from planner.specs.strategy import Offload, Recompute, Strategy

WORTHWHILE = 0.005
"""A change that saves less of the step is within the noise of a measurement."""
MOST_SHOWN = 5

FREED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("micro_batch", ("micro_batch",)),
    ("recompute", ("recompute",)),
    ("sequence_parallel", ("sequence_parallel",)),
    ("zero_stage", ("zero_stage", "shard_degree", "secondary_shard_degree")),
    ("offload", ("offload",)),
    ("vpp", ("vpp", "pipeline_schedule")),
    ("tp", ("tp", "sequence_parallel", "etp", "shard_degree", "secondary_shard_degree")),
    ("pp", ("pp", "vpp", "pipeline_schedule", "shard_degree", "secondary_shard_degree")),
    ("cp", ("cp", "shard_degree", "secondary_shard_degree")),
    ("ep", ("ep", "etp")),
    ("layers_per_stage", ()),
)
"""(what is changed, pins that have to be open for it); replicas and accumulation always follow."""


def improvements(context: CostContext, strategy: Strategy, current: Estimate | None) -> tuple[Improvement, ...]:
    """Single changes of the strategy that make the step faster (or, where it does not fit, make it fit), 16-bit
    arithmetic where the configuration has none, and settings that would; the best first."""
    pins = _pins(context, strategy)
    found: dict[str, Improvement] = {}
    tries = [(context, freed, opened) for freed, opened in FREED]
    if context.job.precision == "fp32" and context.cluster.accelerator.peak.bf16 is not None:
        job = context.job.model_copy(update={"precision": "bf16"})
        tries.append((replace(context, job=job), "precision", ()))
    for asked, freed, opened in tries:
        kept = {name: value for name, value in pins.items() if name not in opened}
        plan = _best(_settled(asked, strategy, freed), kept)
        if plan is None or not _better(plan.estimate, current):
            continue
        change = tuple(differences(strategy, plan.strategy))
        if change:
            faster = None if current is None else plan.estimate.step_time_s / current.step_time_s - 1.0
            found.setdefault(
                plan.strategy.model_dump_json(), Improvement(change=change, plan=plan, step_time_change=faster)
            )
    return ranked((*found.values(), *settings(context, strategy, current)))


def settings(context: CostContext, strategy: Strategy, current: Estimate | None) -> tuple[Improvement, ...]:
    """What the same strategy would gain from the framework's settings that plans write and the configuration lacks;
    nothing for a strategy that is not legal, which no setting cures."""
    if current is None:
        return ()
    usual = get_backend(context.backend.name).habits
    batch = from_strategy(strategy, context.recompute_kinds)
    found = []
    for name, told in lacking(context).items():
        changed = replace(context, backend=context.backend.with_habits(**{name: getattr(usual, name)}))
        estimate = cost_estimate(changed, batch)
        if _better(estimate, current):
            faster = estimate.step_time_s / current.step_time_s - 1.0
            plan = Plan(backend=context.backend.name, strategy=strategy, estimate=estimate)
            found.append(Improvement(change=(told,), plan=plan, step_time_change=faster))
    return tuple(found)


def lacking(context: CostContext) -> dict[str, str]:
    """Habits that plans have and the configuration has not, with the settings that bring them."""
    usual = get_backend(context.backend.name).habits
    return {
        field.name: f"{LEAVE_OUT}{setting[3:]}" if setting.startswith("no ") else f"set {setting}"
        for field in fields(usual)
        if (setting := context.backend.habit_settings.get(field.name)) is not None
        and getattr(context.backend.habits, field.name) != getattr(usual, field.name)
    }


def ranked(changes: Iterable[Improvement]) -> tuple[Improvement, ...]:
    """The best first: fastest, then fewest changes."""
    order = sorted(changes, key=lambda each: (each.plan.estimate.step_time_s, len(each.change)))
    return tuple(order[:MOST_SHOWN])


def _better(new: Estimate, old: Estimate | None) -> bool:
    if old is None or not old.fits:
        return new.fits
    return new.fits and new.step_time_s < old.step_time_s * (1 - WORTHWHILE)


def _pins(context: CostContext, strategy: Strategy) -> dict[str, Pin]:
    """The strategy as pins of the search; groups of sharding that the search does not try stay open."""
    s = strategy
    kind = next(
        (
            kind.id
            for kind in context.recompute_kinds
            if kind.mode == s.recompute.mode and sorted(kind.modules) == sorted(s.recompute.modules)
        ),
        s.recompute.mode,
    )
    pins: dict[str, Pin] = {
        "tp": s.tp, "cp": s.cp, "pp": s.pp, "vpp": s.vpp, "ep": s.ep, "etp": s.etp, "zero_stage": s.zero_stage,
        "micro_batch": s.micro_batch, "recompute": kind, "offload": s.offload.device,
    }  # fmt: skip
    if s.tp > 1:
        pins["sequence_parallel"] = s.sequence_parallel
    if s.pp > 1:
        pins["pipeline_schedule"] = s.pipeline_schedule
    backend, cluster = context.backend, context.cluster
    if s.shard_degree in backend.shard_degrees(cluster, s.tp, s.cp, s.dp, s.zero_stage):
        pins["shard_degree"] = s.shard_degree
        second = s.secondary_shard_degree or 0
        if second in backend.secondary_shard_degrees(cluster, s.shard_degree, s.zero_stage):
            pins["secondary_shard_degree"] = second
    return pins


def _settled(context: CostContext, s: Strategy, freed: str) -> CostContext:
    """The framework without the choices that pins cannot name, but for the freed one: as the configuration has them,
    layers of the stages, recomputation of every layer, and what is offloaded (of a share only where to)."""
    backend = context.backend
    if freed != "recompute" and s.recompute.layers_per_stage is None:
        backend = backend.with_recompute(*(replace(kind, layer_count=False) for kind in context.recompute_kinds))
    if freed != "layers_per_stage" and s.pp * s.vpp > 1:
        backend = backend.with_stages(s.pp, s.vpp, s.layers_per_stage)
    if freed != "offload" and s.offload.device != "none":
        alike = [each for each in backend.offloads if _same_place(each, s.offload)]
        whole = [replace(each, steps=1) for each in alike] if s.offload.optimizer == 1.0 else alike
        backend = backend.with_offloads(*whole)
    return replace(context, backend=backend)


def _same_place(choice: OffloadChoice, offload: Offload) -> bool:
    return (choice.device, choice.parameters) == (offload.device, offload.parameters)


def _best(context: CostContext, pins: Mapping[str, Pin]) -> Plan | None:
    """The best plan under the pins; None where the search has none (or does not know a pinned value)."""
    try:
        outcome = search(Problem(context, pins), top=0, explain=False)
    except InputError:
        return None
    if outcome.interrupted:
        # Of many small searches none is the answer: Ctrl-C ends all of them.
        raise KeyboardInterrupt
    if outcome.best is None:
        return None
    row = outcome.best
    return Plan(
        backend=context.backend.name,
        strategy=to_strategy(row, 0, context.recompute_kinds, context.job),
        estimate=cost_estimate(context, row),
    )


def differences(old: Strategy, new: Strategy) -> Iterator[str]:
    """``tp 4 instead of 8`` for every field that differs, degrees first; what follows from them is left out, as it
    would hide what was changed."""
    for name in Strategy.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and not _follows(name, old, new):
            yield f"{name} {_told(after)} instead of {_told(before)}"


def _follows(name: str, old: Strategy, new: Strategy) -> bool:
    """Whether a field is settled by those that were changed: accumulation, sharding over all replicas, even stages."""
    if name == "shard_degree":
        return all(s.zero_stage == 0 or s.shard_degree == s.dp * s.cp for s in (old, new))
    if name == "layers_per_stage":
        return (old.pp, old.vpp) != (new.pp, new.vpp) and len(set(new.layers_per_stage)) == 1
    return name == "grad_accum"


def _told(value: object) -> str:
    """A value of a strategy as people write it."""
    if isinstance(value, Recompute):
        layers = "" if value.layers_per_stage is None else f" (layers of the stages: {_told(value.layers_per_stage)})"
        return f"{value.mode} {'+'.join(value.modules)}".strip() + layers
    if isinstance(value, Offload):
        weights = f" and the weights to {value.parameters}" if value.parameters != "none" else ""
        return (
            "none" if value.device == "none" else f"{value.optimizer:.0%} of the optimizer to {value.device}{weights}"
        )
    if isinstance(value, tuple):
        return f"{value[0]} each" if len(set(value)) == 1 else ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
