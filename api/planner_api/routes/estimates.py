"""Estimates of given strategies: answered in the request, nothing is kept."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from planner.specs.plan import PlanDocument
from planner_api.openapi import answer, body, problems
from planner_api.routes.answers import json_answer
from planner_api.routes.dependencies import Asker, Served, read_body
from planner_api.routes.profiles import profile_of, profile_text
from planner_api.schemas.questions import EstimateBody
from planner_api.solving import tasks

router = APIRouter(prefix="/v1/estimates", tags=["estimates"])


@router.post(
    "",
    openapi_extra=body(EstimateBody, {"model": "8b", "cluster": {"gpu": "h100", "gpus": 8}, "strategy": {"tp": 2}}),
    response_model=None,
    responses={**problems(415), 200: answer(PlanDocument, "Step time and memory, and whether it fits.")},
)
async def create(request: Request, served: Served, _: Asker) -> Response:
    """Is this strategy legal, does it fit, how fast is it?"""
    asked = await read_body(request, EstimateBody)
    profile = profile_text(await profile_of(asked, asked.backend, served))
    text = await served.quick.run(
        tasks.estimate, asked.model_dump_json(), profile, limit_s=served.settings.quick_time_limit_s
    )
    return json_answer(text)
