"""The use cases: suggest a strategy, estimate a given one, render a plan.

Everything the command line prints comes from the documents returned here; CP-SAT is imported only when a search runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from planner import __version__
from planner.backends import BACKENDS, COMPARED
from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InputError
from planner.service.clusters import resolve_cluster
from planner.service.document import make_document
from planner.service.failures import Interrupted
from planner.service.fit import sentences
from planner.service.inputs import checked_float, checked_int, one_of
from planner.service.jobs import resolve_job
from planner.service.layout import check_rules, resolve_layout
from planner.service.models import resolve_model
from planner.service.pins import parse_pins
from planner.service.profiles import context_of, profile_assumption, profile_for
from planner.service.requests import ClusterInput, JobInput, PlanRequest, Progress, StrategyInput
from planner.service.rule_of_thumb import against_rule_of_thumb
from planner.service.searching import cheapest_cluster, search_backends
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.launcher import Launcher
from planner.specs.plan import Assumption, Plan, PlanDocument, Request, SearchReport
from planner.specs.problems import shown

MAX_TOP = 50
MAX_TIME_LIMIT_S = 86_400.0


class _Question:
    """A resolved question: the specs and what was assumed on the way."""

    def __init__(self, model: str, cluster: ClusterInput, job: JobInput, profile: Path | None) -> None:
        self.model, from_model, model_warnings = resolve_model(model)
        machines = resolve_cluster(cluster)
        self.cluster = machines.cluster
        task = resolve_job(job, self.model, self.cluster)
        self.job = task.job
        self.assumptions: list[Assumption] = [*from_model, *machines.assumptions, *task.assumptions]
        self.warnings: list[str] = [*model_warnings, *task.warnings]
        self.profile = None if profile is None else profile_for(profile, self.cluster)
        if self.profile is not None:
            self.assumptions.append(profile_assumption(self.profile))

    def request(self, backend: str, pins: dict[str, int | str | bool]) -> Request:
        return Request(
            model=self.model, cluster=self.cluster, job=self.job, backend=backend, pins=pins, profile=self.profile
        )


def suggest(request: PlanRequest, progress: Progress | None = None) -> PlanDocument:
    """The best strategy for the request, its alternatives and the best of every backend that was asked.

    Raises InfeasibleError when nothing fits, TimeLimitError when the limit ends the search before anything was found,
    and Interrupted, with the document of what was found until then, on Ctrl-C.
    """
    names = COMPARED if request.backend == "auto" else (request.backend,)
    one_of(request.backend, "--backend", ("auto", *BACKENDS))
    checked_int(request.top, "--top", 1, MAX_TOP)
    if request.time_limit_s is not None:
        checked_float(request.time_limit_s, "--time-limit", 0, MAX_TIME_LIMIT_S, above=True)
    question = _Question(request.model, request.cluster, request.job, request.profile)
    pins = parse_pins(request.pins)
    limits = {"top": request.top, "time_limit_s": request.time_limit_s}
    started = time.monotonic()
    asked = question.request(request.backend, pins)
    interrupted = False
    if question.job.objective == "cost":
        question.cluster, note, interrupted = cheapest_cluster(asked, names, request.time_limit_s, progress)
        question.warnings.append(note)
    left = None if request.time_limit_s is None else max(request.time_limit_s - (time.monotonic() - started), 0.1)
    found = search_backends(question.request(request.backend, pins), names, request.top, left, progress)
    best, interrupted = found.best, interrupted or found.interrupted
    if request.rule_of_thumb and not interrupted:
        line = against_rule_of_thumb(question.request(request.backend, pins), best)
        best = best.model_copy(update={"why": (*best.why, line)})
    document = make_document(
        question.request(request.backend, pins),
        best,
        found.report,
        limits=limits,
        assumptions=question.assumptions,
        warnings=[*question.warnings, *found.warnings],
        alternatives=found.alternatives,
        by_backend=found.by_backend if len(names) > 1 else {},
    )
    if interrupted:
        raise Interrupted(document)
    return document


def estimate(
    model: str,
    cluster: ClusterInput,
    job: JobInput,
    strategy: StrategyInput,
    *,
    backend: str = "megatron",
    profile: Path | None = None,
) -> PlanDocument:
    """Step time and memory of a stated strategy, by the code that the search uses; the answer says whether it fits."""
    name = one_of(backend, "--backend", BACKENDS)
    question = _Question(model, cluster, job, profile)
    asked = question.request(name, {})
    context = context_of(asked, name)
    layout = resolve_layout(strategy, context)
    plan = Plan(
        backend=name,
        strategy=to_strategy(layout.batch, 0, context.recompute_kinds, question.job),
        estimate=cost_estimate(context, layout.batch),
    )
    plan = plan.model_copy(update={"why": sentences(context, plan)})
    stated = plan.strategy.model_dump(mode="json", exclude_none=True)
    return make_document(
        asked,
        plan,
        SearchReport(status="estimated"),
        limits={"strategy": stated},
        assumptions=[*question.assumptions, *layout.assumptions],
        warnings=question.warnings,
    )


def estimate_document(document: PlanDocument) -> PlanDocument:
    """A plan document estimated again, with today's cost model and rules."""
    context = context_of(document.request, document.best.backend)
    batch = from_strategy(document.best.strategy, context.recompute_kinds)
    check_rules(context, batch)
    plan = document.best.model_copy(update={"estimate": cost_estimate(context, batch)})
    return make_document(
        document.request,
        plan,
        SearchReport(status="estimated"),
        limits={"strategy": plan.strategy.model_dump(mode="json", exclude_none=True)},
        assumptions=document.assumptions,
        warnings=document.warnings,
    )


def render_document(document: PlanDocument, *, launcher: str = "torchrun") -> dict[str, str]:
    """The files that start the best plan of a document: relative path -> text.  Refuses a plan that breaks a rule.

    Figures of another strategy or version (an edited or old document) are replaced, so that the guide beside the files
    speaks of what they start.
    """
    from planner.render import render_plan

    check_output(None, launcher)
    again = estimate_document(document).best
    if again.estimate != document.best.estimate:
        warning = (
            f"estimated again by planner {__version__}: the figures in the document were of another plan or version"
        )
        document = document.model_copy(
            update={
                "best": again.model_copy(update={"why": ()}),
                "warnings": (*document.warnings, warning),
            }
        )
    return render_plan(document, launcher=launcher)


def check_output(folder: Path | None, launcher: str) -> None:
    """Refuse an output folder (None: no files) or launcher that cannot be used, before a search is spent on it."""
    for name in launcher.split(","):
        one_of(name.strip(), "--launcher", get_args(Launcher))
    try:
        bad = folder is not None and folder.exists() and not folder.is_dir()
    except (OSError, ValueError):
        bad = True
    if bad:
        raise InputError(
            "this is not a folder", where="--out", got=shown(str(folder)), allowed="a folder", hint="name another"
        )


def start_commands(written: Collection[str]) -> list[str]:
    """Shell commands that start the job from the folder which holds the files called ``written``; by hand when there is
    nothing else."""
    from planner.render import START_COMMANDS

    return [command for name, command in START_COMMANDS.items() if name in written] or ["./launch.sh"]


def write_document(files: dict[str, str], folder: Path, *, force: bool = False) -> list[Path]:
    """Write rendered files below ``folder``; all or none."""
    from planner.render import write_files

    return write_files(folder, files, force=force)
