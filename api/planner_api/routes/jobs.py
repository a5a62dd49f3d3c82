"""A plan as it is answered: its state, links, and the result spliced in as it was stored."""

from __future__ import annotations

import datetime

from planner_api.problems import Problem, ProblemError
from planner_api.schemas.answers import PlanJob, PlanLinks, PlanProgress
from planner_api.services import Services
from planner_api.storage.plans import PlanRow

_NO_RESULT = b'"result":null}'


def job(row: PlanRow) -> PlanJob:
    """The plan without its result."""
    place = f"/v1/plans/{row.id}"
    return PlanJob.model_validate(
        {
            "id": row.id,
            "state": row.state,
            "outcome": row.outcome,
            "created_at": _time(row.created_at),
            "started_at": _time(row.started_at),
            "finished_at": _time(row.finished_at),
            "attempts": row.attempts,
            "progress": None
            if row.progress is None or row.state != "running"
            else PlanProgress.model_validate_json(row.progress),
            "problem": None if row.problem is None else Problem.model_validate_json(row.problem),
            "links": PlanLinks(self=place, result=f"{place}/result", artifacts=f"{place}/artifacts"),
        }
    )


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


async def job_json(row: PlanRow, served: Services) -> bytes:
    """The plan with its result, as JSON; finished ones are remembered, unless a longer search may find more."""
    known: bytes | None = served.finished.get(row.id)
    if known is not None:
        return known
    text = job(row).model_dump_json().encode()
    if row.outcome != "plan":
        return text
    result = await served.plans.result(row.id)
    if result is None:
        return text
    text = text.removesuffix(_NO_RESULT) + b'"result":' + result.encode() + b"}"
    if row.cut_at_s is None and len(text) <= served.finished.maxsize:
        served.finished[row.id] = text
    return text


async def known_plan(plan: str, served: Services) -> PlanRow:
    """The plan; ProblemError 404 where there is none."""
    row = await served.plans.get(plan)
    if row is None:
        raise no_plan()
    return row


def no_plan() -> ProblemError:
    """The answer to an id that no plan has."""
    hint = "finished plans are removed after some time: ask again with POST /v1/plans"
    return ProblemError("not-found", "there is no plan of this id", hint=hint)


async def document_of(row: PlanRow, served: Services) -> str:
    """The plan document; ProblemError 409 while there is none, the plan's own problem where it ended without one."""
    if row.outcome == "plan":
        text = await served.plans.result(row.id)
        if text is not None:
            return text
    if row.problem is not None:
        raise ProblemError.of(Problem.model_validate_json(row.problem))
    if row.state == "cancelled":
        raise ProblemError("conflict", "the plan was cancelled", hint="ask again with POST /v1/plans")
    raise ProblemError(
        "not-ready", f"the plan is {row.state}", hint="ask again a little later", headers={"Retry-After": "1"}
    )
