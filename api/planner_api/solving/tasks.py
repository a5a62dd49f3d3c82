"""What the processes of the pool do: search, estimate, check, render and fit, from JSON to JSON.

Expected failures come back as problems; anything else is raised and ends as a failure of the solver."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

# Loaded by the helper that processes are forked from, so that no search waits for them.
import planner.search.engine
import planner.search.model
from planner import service
from planner.accuracy.fits.calibration import calibrate
from planner.accuracy.fits.usable import check_usable
from planner.accuracy.runs.records import Records
from planner.errors import InfeasibleError, InputError, PlannerError, TimeLimitError
from planner.report.html import html_report, plan_section
from planner.report.markdown import markdown_report
from planner.service.document import ranked, read_plan
from planner.service.requests import SearchState
from planner.specs.measurement import MeasuredRun
from planner.specs.profile import Profile
from planner_api.problems import Problem, of_planner_error
from planner_api.schemas.questions import CheckBody, EstimateBody, PlanBody
from planner_api.solving.processes import telling
from planner_api.wording import ABOUT_MACHINES_AND_JOB, in_fields

__all__ = [
    "REPORTS",
    "Solved",
    "check",
    "estimate",
    "fit",
    "planner",
    "render",
    "report",
    "section",
    "solve",
    "unusable",
]


TELL_EVERY_S = 0.2
SOLVE_LIMIT = "the service's PLANNER_SOLVE_TIME_LIMIT_S (its operator can)"
"""Of whose limit a hint speaks where the request's own is none, or longer."""


@dataclass(frozen=True)
class Solved:
    """How a search ended."""

    state: str
    outcome: str | None
    result: str | None = None
    """The plan document as JSON."""
    problem: str | None = None
    cut_at_s: float | None = None
    """The service's limit of time, where that ended the search early."""


def solve(plan: str, question: str, limit_s: float) -> Solved:
    """Search for the best plan; how far it is, is told as JSON."""
    content = json.loads(question)
    body = PlanBody.model_validate_json(json.dumps(content["body"]))
    profile = None if content["profile"] is None else Profile.model_validate_json(json.dumps(content["profile"]))
    request = body.asked(profile, limit_s)
    own = request.time_limit_s is None or request.time_limit_s >= limit_s
    request = replace(request, time_limit_s=request.time_limit_s or limit_s)
    try:
        document = service.suggest(request, _Teller())
    except (InfeasibleError, TimeLimitError) as problem:
        told = of_planner_error(problem, own={"/time_limit_s": SOLVE_LIMIT} if own else None).model_dump_json()
        complete = isinstance(problem, InfeasibleError) and problem.complete
        outcome = "infeasible" if isinstance(problem, InfeasibleError) else "time-limit"
        return Solved("succeeded", outcome, problem=told, cut_at_s=limit_s if own and not complete else None)
    except InputError as problem:
        # What every route refuses was found before: the rules of the frameworks leave nothing of the pins.
        return Solved("succeeded", "refused", problem=of_planner_error(problem).model_dump_json())
    except PlannerError as problem:
        return Solved("failed", None, problem=of_planner_error(problem).model_dump_json())
    # The id is that of the question as it was asked: the service's own limit is no part of it.
    document = document.model_copy(update={"id": plan})
    result = json.dumps(document.to_json_dict(), allow_nan=False)
    early = own and document.search.status == "feasible"
    return Solved("succeeded", "plan", result=result, cut_at_s=limit_s if early else None)


class _Teller:
    """Tells the state of a search whenever it has changed, but no faster than anybody looks."""

    def __init__(self) -> None:
        self.told: SearchState | None = None
        self.told_at = -math.inf

    def __call__(self, state: SearchState) -> None:
        now = time.monotonic()
        if state == self.told or now - self.told_at < TELL_EVERY_S:
            return
        self.told, self.told_at = state, now
        telling(json.dumps({"text": str(state), **asdict(state)}))


def estimate(body: str, profile: str | None) -> str | Problem:
    """The plan document of a given strategy as JSON."""
    asked = EstimateBody.model_validate_json(body)
    try:
        document = service.estimate(
            asked.stated_model(),
            asked.machines(),
            asked.job.asked(),
            asked.strategy.asked(),
            backend=asked.backend,
            profile=None if profile is None else Profile.model_validate_json(profile),
        )
    except PlannerError as problem:
        return of_planner_error(problem)
    return json.dumps(document.to_json_dict(), allow_nan=False)


def check(body: str) -> str | Problem:
    """The report about a configuration as JSON."""
    asked = CheckBody.model_validate_json(body)
    try:
        report = service.check(asked.asked())
    except PlannerError as problem:
        return of_planner_error(problem, asked.files, {"/strategy/recompute": "/recompute"})
    told = report.model_copy(
        update={
            "warnings": tuple(in_fields(text, options=ABOUT_MACHINES_AND_JOB) for text in report.warnings),
            "findings": tuple(
                finding.model_copy(update={"hint": in_fields(finding.hint, options=ABOUT_MACHINES_AND_JOB)})
                for finding in report.findings
            ),
        }
    )
    return json.dumps(told.to_json_dict(), allow_nan=False)


def render(document: str, rank: int, launcher: str) -> Mapping[str, str] | Problem:
    """The files of one plan of a document: name -> text."""
    try:
        plan = ranked(read_plan(document, "plan"), rank)
        return service.render_document(plan, launcher=launcher)
    except PlannerError as problem:
        return of_planner_error(problem)


def section(document: str, actions: str, rank: int = 1) -> str:
    """One plan of a document as a part of the page; ``actions`` is HTML that follows the verdict."""
    plan = ranked(read_plan(document, "plan"), rank)
    return str(plan_section(plan, actions=actions))


REPORTS = {"html": html_report, "md": markdown_report}
"""Ending of the file -> what writes it."""


def report(document: str, form: str, rank: int = 1) -> str:
    """The report about one plan of a document as one file."""
    return REPORTS[form](ranked(read_plan(document, "plan"), rank))


def unusable(records: Sequence[str]) -> tuple[int, Problem] | None:
    """The first measured run that nothing can be fitted to, as its place among the records, and why."""
    for number, record in enumerate(records):
        try:
            check_usable(MeasuredRun.model_validate_json(record))
        except InputError as problem:
            return number, of_planner_error(problem)
    return None


def fit(records: Mapping[str, str]) -> str | Problem:
    """The machine profile that measured runs support, as JSON; ``records`` by the ids under which they are kept, by
    which the answer calls them: their own may be given twice."""
    runs = [MeasuredRun.model_validate_json(record).model_copy(update={"id": name}) for name, record in records.items()]
    try:
        return calibrate(Records(runs)).profile.model_dump_json()
    except PlannerError as problem:
        return of_planner_error(problem)
