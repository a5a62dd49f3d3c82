"""A plan or an existing configuration in the spelling of another framework, where that framework can run the same job.

The target's rules decide; what it cannot express is refused with the rule and the nearest plan that it can, and what is
lost on the way without changing the strategy is listed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.backends import BACKENDS, get_backend
from planner.backends.base import NONE, RecomputeKind
from planner.cost.context import CostContext
from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InputError
from planner.reading import read_configuration
from planner.render import render_plan
from planner.search.legality import refusals
from planner.search.nearest import nearest
from planner.service.advice import differences
from planner.service.checked import CheckRequest
from planner.service.checking import examine
from planner.service.configurations import no_configuration
from planner.service.document import make_document, strategy_id
from planner.service.fit import sentences
from planner.service.inputs import one_of
from planner.service.profiles import context_of
from planner.specs.batch import EVERY_LAYER, StrategyBatch
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.plan import Plan, PlanDocument, Request, SearchReport
from planner.specs.strategy import Recompute, Strategy

FAMILIES = {"accelerate": {"deepspeed": "accelerate-deepspeed", "": "accelerate-fsdp"}}
"""Names that mean one backend or another by where the strategy comes from."""


@dataclass(frozen=True)
class Converted:
    document: PlanDocument
    lost: tuple[str, ...]
    """What the target does not say or does otherwise."""

    @property
    def short(self) -> tuple[str, ...]:
        """What the machines have too little of for it; none where it fits."""
        request, best = self.document.request, self.document.best
        return sentences(context_of(request, best.backend), best)


def target_name(target: str, source: str) -> str:
    """The backend meant by ``--to`` for a strategy of backend ``source``."""
    wanted = target.strip().lower()
    if wanted in FAMILIES:
        choices = FAMILIES[wanted]
        return choices["deepspeed" if "deepspeed" in source else ""]
    return one_of(wanted, "--to", (*BACKENDS, *FAMILIES))


def convert_document(document: PlanDocument, target: str | None = None) -> Converted:
    """The best plan of a document for another framework; without a target as it is."""
    name = document.best.backend if target is None else target_name(target, document.best.backend)
    if name == document.best.backend:
        return Converted(document, ())
    return _converted(document.request, document.best.strategy, document.best.backend, name)


def convert_files(asked: CheckRequest, target: str | None = None) -> Converted:
    """An existing configuration for another framework; without a target, in the planner's spelling, for its own."""
    found = examine(asked)
    problems = [finding for finding in found.findings if finding.severity == "error"]
    if problems:
        first = problems[0]
        raise InputError(
            f"the configuration is not valid itself: {first.message}",
            where=first.where or ", ".join(found.files),
            got=first.got or None,
            allowed=first.allowed or None,
            hint="`planner check` names everything that is wrong with it",
        )
    request = found.request
    if request is None or found.plan is None:
        raise InputError(
            "the configuration cannot be converted: " + "; ".join(found.warnings),
            where=", ".join(found.files),
            hint="give what is missing: --model, --gpu, --gpus",
        )
    source = found.configuration.backend
    name = source if target is None else target_name(target, source)
    done = _converted(request, found.plan.strategy, source, name)
    again = _read_back(done.document)
    dropped = [setting for setting in found.configuration.unread if setting not in again]
    outside = [*(f"not carried over: {setting}" for setting in dropped), OUTSIDE_PLANS]
    lost = (*done.lost, *outside)
    notes = [f"read from {found.configuration.format}", *outside, *found.warnings]
    document = done.document.model_copy(
        update={
            "assumptions": tuple(found.assumptions),
            "warnings": tuple(dict.fromkeys((*done.document.warnings, *notes))),
        }
    )
    return Converted(document, lost)


OUTSIDE_PLANS = (
    "not carried over: learning rate and schedule, constants of the optimizer, data and tokenizer, initialisation, "
    "rotary base, checkpoints; the written files have placeholders or defaults for them"
)


def _read_back(document: PlanDocument) -> frozenset[str]:
    """Settings without a counterpart in plans that the written files hold all the same."""
    files = {name: text for name, text in render_plan(document).items() if not no_configuration(name)}
    return frozenset(read_configuration(files).unread)


SAME_JOB = ("tp", "cp", "pp", "ep", "micro_batch")
"""Degrees that have to stay: with them every rank sees the same samples and the loss is the same."""


def _converted(request: Request, strategy: Strategy, source: str, name: str) -> Converted:
    asked = request.model_copy(update={"backend": name, "pins": {}})
    context = context_of(asked, name)
    own_loss = asked.job.loss != "auto" and not _takes_loss(context, strategy)
    if own_loss:
        asked = asked.model_copy(update={"job": asked.job.model_copy(update={"loss": "auto"})})
        context = context_of(asked, name)
    batch, lost = _carried(context, strategy, source)
    if own_loss:
        lost.append(f"the loss ({request.job.loss}) becomes the framework's own")
    said = to_strategy(batch, 0, context.recompute_kinds, context.job)
    lost += _other_habits(source, name, said)
    plan = Plan(backend=name, strategy=said, estimate=cost_estimate(context, batch))
    document = make_document(
        asked,
        plan,
        SearchReport(status="estimated"),
        identity=strategy_id(asked, plan),
        warnings=[f"converted from {get_backend(source).title}; {sentence}" for sentence in lost],
    )
    return Converted(document, tuple(lost))


def _takes_loss(context: CostContext, strategy: Strategy) -> bool:
    """Whether the target has the job's implementation of the loss."""
    batch = from_strategy(strategy.model_copy(update={"recompute": Recompute()}), (NONE,))
    return not any(refusal.rule.id == LOSS_RULE for refusal in refusals(context, batch))


LOSS_RULE = "loss-implementation"


def _carried(context: CostContext, strategy: Strategy, source: str) -> tuple[StrategyBatch, list[str]]:
    """The strategy in the target: as it is, or with other sharding, recomputation or offload where it has its own; the
    job stays the same."""
    exact, lost = _batch(context, strategy)
    if exact is not None and not refusals(context, exact):
        return exact, lost
    whose = f"{context.backend.title} cannot run this {get_backend(source).title} plan"
    try:
        row = nearest(context, strategy, {name: getattr(strategy, name) for name in SAME_JOB})
    except InputError as problem:
        raise InputError(
            f"{whose}: {problem.message}",
            where="--to",
            got=problem.got,
            allowed=problem.allowed,
            hint=_nearest(context, strategy),
        ) from problem
    if row is None:
        raise InputError(
            f"{whose}: with the same mesh and micro-batch nothing that it can run fits",
            where="--to",
            hint=_nearest(context, strategy),
        )
    return row, list(differences(strategy, to_strategy(row, 0, context.recompute_kinds, context.job)))


def _batch(context: CostContext, strategy: Strategy) -> tuple[StrategyBatch | None, list[str]]:
    """The strategy with the target's recompute kinds and stages: the same modules, or what it calls the same mode; None
    where it has no such mode or split."""
    kind, changed = _recompute_kind(context, strategy.recompute)
    if kind is None:
        return None, []
    layers = _own_layout(context, strategy)
    if layers is None:
        return None, []
    batch = from_strategy(strategy.model_copy(update={"recompute": Recompute(), "layers_per_stage": layers}), (NONE,))
    counts = strategy.recompute.layers_per_stage
    index = context.recompute_kinds.index(kind)
    most = 0 if kind.mode == "none" else EVERY_LAYER if counts is None else max(counts)
    lost = [changed] if changed else []
    if layers != strategy.layers_per_stage:
        own, given = (",".join(map(str, each)) for each in (layers, strategy.layers_per_stage))
        lost.append(f"layers of the stages: {own}, as it splits them itself, instead of {given}")
    if counts is not None and not kind.layer_count:
        most = EVERY_LAYER
        lost.append(f"recomputation of {max(counts)} layers a stage becomes that of all layers")
    return batch.with_values(recompute_kind=np.array([index]), recompute_layers=np.array([most])), lost


def _own_layout(context: CostContext, s: Strategy) -> tuple[int, ...] | None:
    """The layers of the stages as the target has them: as they are where a setting says so, else as it splits them
    itself; None where it cannot."""
    if s.pp == 1 or context.backend.layouts(context.model, s.pp, s.vpp) == "free":
        return s.layers_per_stage
    return context.backend.default_layout(context.model, s.pp, s.vpp)


def _recompute_kind(context: CostContext, wanted: Recompute) -> tuple[RecomputeKind | None, str]:
    kinds = context.recompute_kinds
    for kind in kinds:
        if kind.mode == wanted.mode and sorted(kind.modules) == sorted(wanted.modules):
            return kind, ""
    alike = [kind for kind in kinds if kind.mode == wanted.mode]
    if not alike:
        return None, ""
    named = f"{wanted.mode} {'+'.join(wanted.modules)}".strip()
    return alike[0], f"recomputation of {'+'.join(wanted.modules) or named} becomes {alike[0].id}"


def _nearest(context: CostContext, strategy: Strategy) -> str:
    """The nearest plan that the target can run, as the pins that ask for it."""
    name = context.backend.name
    row = nearest(context, strategy)
    if row is None:
        return f"no plan of {name} fits this job: `planner suggest --backend {name}` says why"
    s = to_strategy(row, 0, context.recompute_kinds, context.job)
    degrees = {"tp": s.tp, "cp": s.cp, "pp": s.pp, "ep": s.ep}
    pins = [f"{degree}={value}" for degree, value in degrees.items() if value > 1 or getattr(strategy, degree) > 1]
    pins += [f"zero_stage={s.zero_stage}", f"micro_batch={s.micro_batch}", f"recompute={s.recompute.mode}"]
    if s.offload.device != "none":
        pins.append(f"offload={s.offload.device}")
    return f"the nearest plan that it can run: --backend {name} --pin {','.join(pins)}"


def _other_habits(source: str, target: str, strategy: Strategy) -> list[str]:
    """How a step differs between the two frameworks although the strategy is the same."""
    one, other = BACKENDS[source], BACKENDS[target]
    if one.family == other.family:
        return []
    lost = []
    if one.habits.fused_kernels != other.habits.fused_kernels:
        lost.append(f"kernels are {'fused' if other.habits.fused_kernels else 'not fused'} there")
    if strategy.cp > 1 and one.habits.context_parallel_comm != other.habits.context_parallel_comm:
        lost.append(
            f"context parallelism is {other.habits.context_parallel_comm}, not {one.habits.context_parallel_comm}"
        )
    if one.habits.data_parallel_overlap != other.habits.data_parallel_overlap:
        lost.append("gradients are reduced at another time: step time and memory differ")
    return lost
