"""What one change to a configuration would bring: each choice is freed in turn, everything else stays as it is.

The search that makes plans answers it, so what is advised is legal and fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace

from planner.backends import get_backend
from planner.cost.context import CostContext
from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InputError
from planner.search.engine import search
from planner.search.outcome import Pin
from planner.search.problem import Problem
from planner.specs.check import Improvement
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
    ("tp", ("tp", "sequence_parallel", "etp", "shard_degree")),
    ("pp", ("pp", "vpp", "pipeline_schedule", "shard_degree")),
    ("cp", ("cp", "shard_degree")),
    ("ep", ("ep", "etp")),
)
"""(what is changed, pins that have to be open for it); replicas and accumulation always follow."""


def improvements(context: CostContext, strategy: Strategy, current: Estimate | None) -> tuple[Improvement, ...]:
    """Single changes of the strategy that make the step faster (or, where it does not fit, make it fit), and settings
    that would; the best first."""
    pins = _pins(context, strategy)
    found: dict[str, Improvement] = {}
    for _, opened in FREED:
        kept = {name: value for name, value in pins.items() if name not in opened}
        plan = _best(context, kept)
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
    """What the same strategy would gain from the framework's settings that plans write and the configuration lacks."""
    usual = get_backend(context.backend.name).habits
    batch = from_strategy(strategy, context.recompute_kinds)
    found = []
    for field in fields(usual):
        said, plain = getattr(context.backend.habits, field.name), getattr(usual, field.name)
        setting = context.backend.habit_settings.get(field.name)
        if setting is None or said == plain:
            continue
        changed = replace(context, backend=context.backend.with_habits(**{field.name: plain}))
        estimate = cost_estimate(changed, batch)
        if _better(estimate, current):
            faster = None if current is None else estimate.step_time_s / current.step_time_s - 1.0
            plan = Plan(backend=context.backend.name, strategy=strategy, estimate=estimate)
            found.append(Improvement(change=(f"set {setting}",), plan=plan, step_time_change=faster))
    return tuple(found)


def ranked(changes: Iterable[Improvement]) -> tuple[Improvement, ...]:
    """The best first: fastest, then fewest changes."""
    order = sorted(changes, key=lambda each: (each.plan.estimate.step_time_s, len(each.change)))
    return tuple(order[:MOST_SHOWN])


def _better(new: Estimate, old: Estimate | None) -> bool:
    if old is None or not old.fits:
        return new.fits
    return new.fits and new.step_time_s < old.step_time_s * (1 - WORTHWHILE)


def _pins(context: CostContext, strategy: Strategy) -> dict[str, Pin]:
    """The strategy as pins of the search; a recomputed share of the layers and an offloaded share stay open."""
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
    return pins


def _best(context: CostContext, pins: Mapping[str, Pin]) -> Plan | None:
    """The best plan under the pins; None where the search has none (or does not know a pinned value)."""
    try:
        outcome = search(Problem(context, pins), top=0, explain=False)
    except InputError:
        return None
    if outcome.best is None:
        return None
    row = outcome.best
    return Plan(
        backend=context.backend.name,
        strategy=to_strategy(row, 0, context.recompute_kinds, context.job),
        estimate=cost_estimate(context, row),
    )


def differences(old: Strategy, new: Strategy) -> Iterator[str]:
    """``tp 4 instead of 8`` for every field that differs, degrees first."""
    for name in Strategy.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name not in _FOLLOWING:
            yield f"{name} {_told(after)} instead of {_told(before)}"


_FOLLOWING = ("grad_accum", "shard_degree")
"""Follow from the other fields; naming them would hide what was changed."""


def _told(value: object) -> str:
    """A value of a strategy as people write it."""
    if isinstance(value, Recompute):
        layers = "" if value.layers_per_stage is None else f" ({', '.join(map(str, value.layers_per_stage))} layers)"
        return f"{value.mode} {'+'.join(value.modules)}".strip() + layers
    if isinstance(value, Offload):
        return "none" if value.device == "none" else f"{value.optimizer:.0%} of the optimizer to {value.device}"
    if isinstance(value, tuple):
        return f"{value[0]} each" if len(set(value)) == 1 else ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
