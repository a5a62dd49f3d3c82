"""Checks of existing configurations: answered in the request, nothing of the files is kept or executed."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from planner.specs.check import CheckReport
from planner_api.openapi import answer, body, problems
from planner_api.routes.answers import json_answer
from planner_api.routes.dependencies import Asker, Served, read_body
from planner_api.schemas.questions import CheckBody
from planner_api.solving import tasks

router = APIRouter(prefix="/v1/checks", tags=["checks"])
_EXAMPLE = {
    "files": {"ds_config.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}'},
    "model": "8b",
    "cluster": {"gpu": "h100", "gpus": 8},
}


@router.post(
    "",
    openapi_extra=body(CheckBody, _EXAMPLE),
    response_model=None,
    responses={**problems(415), 200: answer(CheckReport, "What is wrong with it, whether it fits, what would help.")},
)
async def create(request: Request, served: Served, _: Asker) -> Response:
    """Is this configuration legal, does it fit, what is silently wrong, what would help?"""
    asked = await read_body(request, CheckBody)
    text = await served.quick.run(tasks.check, asked.model_dump_json(), limit_s=served.settings.quick_time_limit_s)
    return json_answer(text)
