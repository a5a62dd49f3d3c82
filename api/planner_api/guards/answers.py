"""Problems as answers, also from code that runs outside of the routes."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from planner_api.guards.identity import request_id
from planner_api.problems import MEDIA_TYPE, Problem


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The problem with the request's id."""
    told = problem.model_copy(update={"instance": f"urn:planner:request:{request_id()}"})
    return Response(
        told.model_dump_json(exclude_none=True),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers={"Cache-Control": "no-store", **(headers or {})},
    )
