"""Plans: asked for, looked at, listed, cancelled."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from planner.service.questions import plan_question
from planner.specs.plan import PlanDocument
from planner_api.guards.tokens import Caller
from planner_api.openapi import answer, body, problems
from planner_api.problems import ProblemError
from planner_api.routes.answers import etag_of, json_answer, unchanged
from planner_api.routes.dependencies import After, Asker, Limit, PlanId, Reader, Served, cursor, read_body, read_cursor
from planner_api.routes.jobs import document_of, job, job_json, known_plan
from planner_api.routes.profiles import profile_of, profile_text
from planner_api.schemas.answers import PlanJob, PlanList
from planner_api.schemas.questions import PlanBody
from planner_api.services import Services
from planner_api.storage.plans import PlanRow, QueueFullError

router = APIRouter(prefix="/v1/plans", tags=["plans"])

POLL_S = (0.1, 1.0)
"""First and longest pause between looks at a plan that another process may be working on."""
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})(?![\w.])", re.IGNORECASE)
Prefer = Annotated[
    str | None, Header(alias="Prefer", max_length=200, description="`wait=N`: hold the answer for up to N seconds.")
]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="A request that is sent again with the same key is not another one.",
    ),
]


@router.post(
    "",
    openapi_extra=body(PlanBody, {"model": "70b", "cluster": {"gpu": "h100", "gpus": 128}}),
    response_model=None,
    responses={
        **problems(409, 415),
        200: answer(PlanJob, "The plan has ended.", ETag="Of the answer.", Content_Location="The plan."),
        202: answer(
            PlanJob, "The plan is being made.", Location="Where to look.", Retry_After="When to look, seconds."
        ),
    },
)
async def create(
    request: Request, served: Served, caller: Asker, _prefer: Prefer = None, idempotency_key: Key = None
) -> Response:
    """Ask for the best strategy.  The same question, however it is put, is the same plan."""
    asked = await read_body(request, PlanBody)
    if idempotency_key is None:
        return await _answered(request, asked, served)
    await _begin(caller, idempotency_key, await request.body(), served)
    answered = False
    try:
        response = await _answered(request, asked, served)
        answered = True
        return response
    finally:
        await served.idempotency.end(caller.id, idempotency_key, answered=answered)


async def _begin(caller: Caller, key: str, content: bytes, served: Services) -> None:
    verdict = await served.idempotency.begin(caller.id, key, hashlib.sha256(content).hexdigest())
    if verdict == "other-request":
        raise ProblemError("key-reused", "this Idempotency-Key came with another body", hint="use a new key")
    if verdict == "in-progress":
        raise ProblemError(
            "conflict",
            "the request with this Idempotency-Key is being answered",
            hint="send it again a little later: it has the same answer",
            headers={"Retry-After": "1"},
        )


async def _answered(request: Request, asked: PlanBody, served: Services) -> Response:
    profile = await profile_of(asked, asked.backend, served)
    plan = plan_question(asked.asked(profile, served.settings.solve_time_limit_s)).id
    wait_s, applied = _wait_s(request, served)
    known = served.finished.get(plan)
    if known is None:
        row = await accepted(plan, asked, profile_text(profile), served)
        row = await finished(row, wait_s, served)
        known = await job_json(row, served)
        if not row.finished:
            return json_answer(known, 202, {"Location": f"/v1/plans/{plan}", "Retry-After": "1", **applied})
    etag = etag_of(plan, hashlib.sha256(known).hexdigest())
    return json_answer(known, 200, {"ETag": etag, "Content-Location": f"/v1/plans/{plan}", **applied})


async def accepted(plan: str, asked: PlanBody, profile: str | None, served: Services) -> PlanRow:
    """The plan's row, put into the queue where it is not there yet; ProblemError 503 where the queue is full."""
    if served.ending:
        raise ProblemError(
            "shutting-down", "the service is ending", hint="ask again a little later", headers={"Retry-After": "10"}
        )
    question = json.dumps({"body": asked.model_dump(mode="json"), "profile": profile and json.loads(profile)})
    settings = served.settings
    try:
        row, put = await served.plans.accept(plan, question, settings.queue_limit, settings.solve_time_limit_s)
    except QueueFullError:
        raise ProblemError(
            "queue-full",
            f"{settings.queue_limit} plans wait already",
            hint="ask again later; plans that are known are answered all the same",
            headers={"Retry-After": "5"},
        ) from None
    if put:
        served.forget(plan)
        await served.queue.put(plan)
    return row


async def finished(row: PlanRow, wait_s: float, served: Services) -> PlanRow:
    """The plan's row when it has ended, or as it is after the time."""
    deadline = time.monotonic() + wait_s
    pause, longest = POLL_S
    while not row.finished and not served.ending and (left := deadline - time.monotonic()) > 0:
        await served.completions.wait(row.id, min(pause, left))
        pause = min(1.5 * pause, longest)
        row = await served.plans.get(row.id) or row
    return row


def _wait_s(request: Request, served: Services) -> tuple[float, dict[str, str]]:
    """Seconds to hold the answer, and the header that says what was taken of the preference (RFC 7240)."""
    # The header may stand on several lines.
    found = _WAIT.search(", ".join(request.headers.getlist("prefer")))
    if found is None:
        return served.settings.quick_wait_s, {}
    seconds = min(float(found[1]), served.settings.longest_wait_s)
    return seconds, {"Preference-Applied": f"wait={seconds:g}"}


@router.get(
    "",
    response_model=None,
    responses={**problems(), 200: answer(PlanList, "A page, the youngest first.", Link="To the next page.")},
)
async def listed(served: Served, _: Reader, limit: Limit = 50, after: After = None) -> Response:
    """Plans that were asked for, without their results."""
    rows = await served.plans.page(limit + 1, read_cursor(after))
    last = rows[limit - 1] if len(rows) > limit else None
    following = None if last is None else f"/v1/plans?limit={limit}&after={cursor(last.created_at, last.id)}"
    page = PlanList(plans=tuple(job(row) for row in rows[:limit]), next=following)
    return json_answer(page.model_dump_json(), headers={"Link": f'<{following}>; rel="next"'} if following else None)


@router.get(
    "/{plan}",
    response_model=None,
    responses={
        **problems(404),
        200: answer(PlanJob, "The plan as it is.", ETag="Of the answer.", Retry_After="While it is being made."),
        304: {"description": "It is what the client has."},
    },
)
async def look(plan: PlanId, request: Request, served: Served, _: Reader) -> Response:
    """How far the plan is: state, progress with the best so far and its bound, and the result when there is one."""
    row = await known_plan(plan, served)
    text = await job_json(row, served)
    etag = etag_of(plan, hashlib.sha256(text).hexdigest())
    headers = {"ETag": etag} if row.finished else {"ETag": etag, "Retry-After": "1"}
    return unchanged(request, etag) or json_answer(text, headers=headers)


@router.get(
    "/{plan}/result",
    response_model=None,
    responses={
        **problems(404, 409),
        200: answer(PlanDocument, "The same document that `planner suggest --json` prints.", ETag="Of the document."),
        304: {"description": "It is what the client has."},
    },
)
async def result(plan: PlanId, request: Request, served: Served, _: Reader) -> Response:
    """The plan document alone: 409 while it is being made, the plan's problem where it ended without one."""
    row = await known_plan(plan, served)
    text = await document_of(row, served)
    etag = etag_of(plan, "result", hashlib.sha256(text.encode()).hexdigest())
    return unchanged(request, etag) or json_answer(text, headers={"ETag": etag})


@router.delete("/{plan}", response_model=None, responses={**problems(404), 200: answer(PlanJob, "The plan as it is.")})
async def cancel(plan: PlanId, served: Served, _: Asker) -> Response:
    """Cancel the plan: one that waits ends at once, one that is being made soon; one that has ended stays."""
    row = await served.plans.cancel(plan)
    if row is None:
        raise ProblemError("not-found", "there is no plan of this id", hint="GET /v1/plans lists the ids")
    return json_answer(job(row).model_dump_json())
