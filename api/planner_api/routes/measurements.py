"""Measured runs that jobs post back; later plans use them when they are asked with ``"profile": "measurements"``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from planner.accuracy.comparison.report import framework_of
from planner.catalog import load_accelerator
from planner.errors import InputError
from planner.specs.measurement import MeasuredRun
from planner_api.openapi import answer, body, problems
from planner_api.problems import FieldProblem, ProblemError, of_validation
from planner_api.routes.dependencies import Admin, After, Asker, Limit, Reader, Served, cursor, read_body, read_cursor
from planner_api.schemas.answers import MeasurementList, MeasurementsTaken
from planner_api.schemas.questions import MeasurementsBody

router = APIRouter(prefix="/v1/measurements", tags=["measurements"])
_HINT = "`planner validate` writes records of this form"
Identifier = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="Id of a record.")]


@router.post(
    "",
    openapi_extra=body(MeasurementsBody),
    response_model=None,
    status_code=201,
    responses={**problems(415), 201: answer(MeasurementsTaken, "The records are kept.")},
)
async def create(request: Request, served: Served, _: Asker) -> Response:
    """Keep measured runs; all or none."""
    given = await read_body(request, MeasurementsBody)
    rows = [_checked(record, f"/records/{number}") for number, record in enumerate(given.records)]
    accepted: list[str] = []
    known: list[str] = []
    for identifier, accelerator, framework, record in rows:
        new = await served.measurements.add(identifier, accelerator, framework, record)
        (accepted if new else known).append(identifier)
    return JSONResponse({"accepted": accepted, "known": known}, status_code=201)


def _checked(record: Mapping[str, object], place: str) -> tuple[str, str, str, str]:
    """(id, accelerator, framework, JSON) of a record that a profile can be fitted to."""
    text = json.dumps(record, sort_keys=True)
    problem: FieldProblem | None = None
    try:
        run = MeasuredRun.model_validate_json(text)
        if run.measured.step_time_s is None:
            problem = FieldProblem(pointer=f"{place}/measured/step_time_s", detail="a measured step time is needed")
        elif run.hardware.gpu is None:
            problem = FieldProblem(pointer=f"{place}/hardware/gpu", detail="the accelerator is needed")
        else:
            identifier = hashlib.sha256(text.encode()).hexdigest()
            return identifier, load_accelerator(run.hardware.gpu).id, framework_of(run), text
    except InputError as error:
        problem = FieldProblem(pointer=f"{place}/hardware/gpu", detail=error.message)
    except ValidationError as error:
        told = of_validation(error.errors(include_url=False, include_context=False, include_input=False), record, place)
        raise ProblemError("bad-input", told.detail, errors=told.errors, hint=_HINT) from None
    raise ProblemError("bad-input", problem.detail, errors=[problem], hint=_HINT)


@router.get(
    "",
    response_model=None,
    responses={**problems(), 200: answer(MeasurementList, "A page, the youngest first.", Link="To the next page.")},
)
async def listed(served: Served, _: Reader, limit: Limit = 50, after: After = None) -> Response:
    """Records that are kept."""
    rows = await served.measurements.page(limit + 1, read_cursor(after))
    items = [{"id": identifier, "record": json.loads(record)} for _, identifier, record in rows[:limit]]
    last = rows[limit - 1] if len(rows) > limit else None
    following = None if last is None else f"/v1/measurements?limit={limit}&after={cursor(last[0], last[1])}"
    headers = {"Link": f'<{following}>; rel="next"'} if following else {}
    return JSONResponse({"items": items, "next": following}, headers=headers)


@router.delete(
    "/{record}", response_model=None, status_code=204, responses={**problems(404), 204: {"description": "It is gone."}}
)
async def remove(record: Identifier, served: Served, _: Admin) -> Response:
    """Remove a record, for example one of a run that was disturbed."""
    if not await served.measurements.remove(record):
        raise ProblemError("not-found", "there is no such record", hint="GET /v1/measurements lists the ids")
    return Response(status_code=204)
