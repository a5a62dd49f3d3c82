"""Puts search outcomes and estimates into the plan document, gives it its id, and reads it back from a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from planner.backends import BACKENDS
from planner.catalog import CATALOG_VERSION
from planner.errors import InputError
from planner.service.inputs import one_of, parse_mapping, read_mapping
from planner.service.profiles import check_profile
from planner.specs.plan import SCHEMA_VERSION, Assumption, Plan, PlanDocument, Request, SearchReport
from planner.specs.problems import input_error
from planner.version import __version__

if TYPE_CHECKING:
    from planner.search.outcome import Outcome


def document_id(request: Request, limits: dict[str, Any]) -> str:
    """SHA-256 of the normalised question and the catalogue version: the same question has the same id."""
    asked = request.model_dump(mode="json")
    if request.profile is None:
        del asked["profile"]
    question = {"request": asked, "limits": limits, "catalog": CATALOG_VERSION}
    return hashlib.sha256(json.dumps(question, sort_keys=True, allow_nan=False).encode()).hexdigest()


def strategy_id(request: Request, plan: Plan) -> str:
    """The id of the question how good a given strategy is."""
    return document_id(request, {"strategy": plan.strategy.model_dump(mode="json", exclude_none=True)})


def ranked(document: PlanDocument, rank: int) -> PlanDocument:
    """The document about one of its plans: 1 is the best one's, the whole; an alternative stands alone, as if it had
    been estimated."""
    if rank == 1:
        return document
    plan = document.alternatives[rank - 2]
    alone = {"alternatives": (), "by_backend": {}, "search": SearchReport(status="estimated")}
    return document.model_copy(update={"best": plan, "id": strategy_id(document.request, plan), **alone})


def make_document(
    request: Request,
    best: Plan,
    search: SearchReport,
    *,
    identity: str,
    assumptions: Sequence[Assumption] = (),
    warnings: Sequence[str] = (),
    alternatives: Sequence[Plan] = (),
    by_backend: dict[str, Plan | None] | None = None,
) -> PlanDocument:
    """The document that command line, library and plan.json share; ``identity`` is the id of the question as asked."""
    return PlanDocument(
        planner_version=__version__,
        id=identity,
        request=request,
        assumptions=tuple(assumptions),
        warnings=tuple(dict.fromkeys(warnings)),
        best=best,
        alternatives=tuple(alternatives),
        by_backend=by_backend or {},
        search=search,
    )


def merged_report(outcomes: dict[str, Outcome], best: Plan) -> SearchReport:
    """One report of the searches of several backends: counts add up, the bound is the lowest.

    With several backends the rule ids carry the backend's name in front.
    """
    rejected: dict[str, int] = {}
    for name, outcome in outcomes.items():
        for rule, times in outcome.rejected.items():
            rejected[f"{name}: {rule}" if len(outcomes) > 1 else rule] = times
    proven = all(outcome.status != "feasible" for outcome in outcomes.values())
    bounds = [outcome.best_bound_s for outcome in outcomes.values() if outcome.status != "infeasible"]
    bound = None if any(value is None for value in bounds) else min(value for value in bounds if value is not None)
    step = best.estimate.step_time_s
    return SearchReport(
        status="optimal" if proven else "feasible",
        best_bound_s=bound,
        gap=0.0 if proven else None if bound is None else max(0.0, (step - bound) / step),
        candidates=sum(outcome.candidates for outcome in outcomes.values()),
        rejected=dict(sorted(rejected.items(), key=lambda item: -item[1])),
        solved=sum(outcome.solved for outcome in outcomes.values()),
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
    )


def load_plan(path: Path) -> PlanDocument:
    """The document of a plan.json that ``suggest --json`` or ``estimate --json`` wrote."""
    return _document(read_mapping(path, "plan"), str(path))


def read_plan(text: str, where: str) -> PlanDocument:
    """The same from the text of a plan.json; ``where`` names it in errors."""
    return _document(parse_mapping(text, where, as_json=True), where)


def _document(content: dict[str, Any], where: str) -> PlanDocument:
    version = content.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            "this is not a plan document of this version",
            where=f"{where}: schema_version",
            got=repr(version)[:80],
            allowed=str(SCHEMA_VERSION),
            hint="write one with `planner suggest ... --json > plan.json`",
        )
    try:
        document = PlanDocument.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as problem:
        raise input_error(problem, where) from problem
    one_of(document.best.backend, f"{where}: best.backend", BACKENDS)
    if document.request.profile is not None:
        check_profile(document.request.profile, f"{where}: request.profile")
    _check_consistent(document, where)
    return document


def _check_consistent(document: PlanDocument, where: str) -> None:
    """A document edited by hand must still be about its own cluster and job."""
    strategy, request = document.best.strategy, document.request
    calibrated = request.cluster.accelerator.id if request.profile is None else request.profile.accelerator
    pairs: tuple[tuple[str, int | str, str, int | str], ...] = (
        ("request.profile.accelerator", calibrated, "request.cluster.accelerator.id", request.cluster.accelerator.id),
        ("tp * pp * cp * dp", strategy.gpus, "request.cluster.gpus", request.cluster.gpus),
        ("strategy.global_batch", strategy.global_batch, "request.job.global_batch", request.job.global_batch),
        ("strategy.seq_len", strategy.seq_len, "request.job.seq_len", request.job.seq_len),
        (
            "micro_batch * dp * grad_accum",
            strategy.micro_batch * strategy.dp * strategy.grad_accum,
            "strategy.global_batch",
            strategy.global_batch,
        ),
        ("strategy.precision", strategy.precision, "request.job.precision", request.job.precision),
        ("sum(layers_per_stage)", sum(strategy.layers_per_stage), "request.model.layers", request.model.layers),
    )
    for left, value, right, expected in pairs:
        if value != expected:
            raise InputError(
                f"{left} = {value}, but {right} = {expected}",
                where=f"{where}: best.strategy",
                hint="make a new document with `planner suggest` or `planner estimate`",
            )
