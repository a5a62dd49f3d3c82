"""The use cases: suggest a strategy, estimate a given one, render a plan.

Everything the command line prints comes from the documents returned here; CP-SAT is imported only when a search runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from planner.backends import BACKENDS
from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InputError
from planner.service.document import make_document, strategy_id
from planner.service.failures import Interrupted
from planner.service.fit import sentences
from planner.service.inputs import one_of
from planner.service.layout import check_rules, resolve_layout
from planner.service.profiles import context_of
from planner.service.questions import plan_question, resolve, searched
from planner.service.requests import ClusterInput, JobInput, PlanRequest, SearchProgress, StatedModel, StrategyInput
from planner.service.rule_of_thumb import against_rule_of_thumb
from planner.service.searching import cheapest_cluster, search_backends
from planner.specs.convert import from_strategy, to_strategy
from planner.specs.launcher import Launcher
from planner.specs.plan import Plan, PlanDocument, SearchReport
from planner.specs.problems import shown
from planner.specs.profile import Profile
from planner.version import __version__


def suggest(request: PlanRequest, progress: SearchProgress | None = None) -> PlanDocument:
    """The best strategy for the request, its alternatives and the best of every backend that was asked.

    Raises InfeasibleError when nothing fits, TimeLimitError when the limit ends the search before anything was found,
    and Interrupted, with the document of what was found until then, on Ctrl-C.
    """
    names = searched(request)
    question = plan_question(request)
    asked = question.request
    warnings = list(question.warnings)
    started = time.monotonic()
    interrupted = False
    if asked.job.objective == "cost":
        cluster, note, interrupted = cheapest_cluster(asked, names, request.time_limit_s, progress)
        asked = asked.model_copy(update={"cluster": cluster})
        warnings.append(note)
    left = None if request.time_limit_s is None else max(request.time_limit_s - (time.monotonic() - started), 0.1)
    found = search_backends(asked, names, request.top, left, progress)
    best, interrupted = found.best, interrupted or found.interrupted
    if request.rule_of_thumb and not interrupted:
        best = best.model_copy(update={"why": (*best.why, against_rule_of_thumb(asked, best))})
    document = make_document(
        asked,
        best,
        found.report,
        identity=question.id,
        assumptions=question.assumptions,
        warnings=[*warnings, *found.warnings],
        alternatives=found.alternatives,
        by_backend=found.by_backend if len(names) > 1 else {},
    )
    if interrupted:
        raise Interrupted(document)
    return document


def estimate(
    model: str | StatedModel,
    cluster: ClusterInput,
    job: JobInput,
    strategy: StrategyInput,
    *,
    backend: str = "megatron",
    profile: Path | Profile | None = None,
) -> PlanDocument:
    """Step time and memory of a stated strategy, by the code that the search uses; the answer says whether it fits."""
    name = one_of(backend, "--backend", BACKENDS)
    question = resolve(model, cluster, job, profile, name, {})
    asked = question.request
    context = context_of(asked, name)
    layout = resolve_layout(strategy, context)
    plan = Plan(
        backend=name,
        strategy=to_strategy(layout.batch, 0, context.recompute_kinds, asked.job),
        estimate=cost_estimate(context, layout.batch),
    )
    return make_document(
        asked,
        plan.model_copy(update={"why": sentences(context, plan)}),
        SearchReport(status="estimated"),
        identity=strategy_id(asked, plan),
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
        identity=strategy_id(document.request, plan),
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
