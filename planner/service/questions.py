"""From what a caller asks to the question that is searched: the specs, what was assumed, and the question's id.

What can be wrong with a request is found here, before any work is queued or done; only that the rules of the frameworks
leave nothing of its pins takes a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.backends import BACKENDS, COMPARED
from planner.errors import InputError
from planner.service.clusters import resolve_cluster
from planner.service.document import document_id
from planner.service.inputs import checked_float, checked_int, one_of
from planner.service.jobs import resolve_job
from planner.service.models import resolve_model
from planner.service.pins import parse_pins
from planner.service.profiles import profile_assumption, profile_for
from planner.service.requests import ClusterInput, JobInput, PinValue, PlanRequest, StatedModel
from planner.service.searching import check_pins
from planner.specs.plan import Assumption, Request
from planner.specs.profile import Profile

MAX_TOP = 50
MAX_TIME_LIMIT_S = 86_400.0


@dataclass(frozen=True)
class Question:
    """A question in specs, and what was assumed on the way to them."""

    request: Request
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class PlanQuestion(Question):
    """A question to the search."""

    limits: dict[str, Any]
    """What else the answer depends on."""

    @property
    def id(self) -> str:
        """The same for every way to ask the same."""
        return document_id(self.request, self.limits)


def resolve(
    model: str | StatedModel,
    cluster: ClusterInput,
    job: JobInput,
    profile: Path | Profile | None,
    backend: str,
    pins: dict[str, PinValue],
) -> Question:
    """The specs that are meant; InputError names what cannot be used."""
    spec, from_model, model_warnings = resolve_model(model)
    machines = resolve_cluster(cluster)
    task = resolve_job(job, spec, machines.cluster)
    assumptions = [*from_model, *machines.assumptions, *task.assumptions]
    used = None if profile is None else profile_for(profile, machines.cluster)
    if used is not None:
        assumptions.append(profile_assumption(used))
    request = Request(
        model=spec, cluster=machines.cluster, job=task.job, backend=backend, pins=dict(pins), profile=used
    )
    return Question(request, tuple(assumptions), (*model_warnings, *task.warnings))


def plan_question(asked: PlanRequest) -> PlanQuestion:
    """The question behind a request for a plan."""
    one_of(asked.backend, "--backend", ("auto", *BACKENDS))
    checked_int(asked.top, "--top", 1, MAX_TOP)
    if asked.time_limit_s is not None:
        checked_float(asked.time_limit_s, "--time-limit", 0, MAX_TIME_LIMIT_S, above=True)
    found = resolve(asked.model, asked.cluster, asked.job, asked.profile, asked.backend, parse_pins(asked.pins))
    _check_price(found.request)
    check_pins(found.request, searched(asked))
    limits: dict[str, Any] = {"top": asked.top, "time_limit_s": asked.time_limit_s}
    if asked.rule_of_thumb:
        limits["rule_of_thumb"] = True
    return PlanQuestion(found.request, found.assumptions, found.warnings, limits)


def searched(asked: PlanRequest) -> tuple[str, ...]:
    """The frameworks that a request is about."""
    return COMPARED if asked.backend == "auto" else (asked.backend,)


def _check_price(request: Request) -> None:
    if request.job.objective == "cost" and request.cluster.usd_per_gpu_hour is None:
        raise InputError(
            f"no price is known for {request.cluster.accelerator.id}",
            where="--objective cost",
            hint="give dollars per GPU-hour with --price",
        )
