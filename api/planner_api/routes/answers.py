"""Answers whose JSON is made already, with their ETag."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from planner_api.guards.answers import problem_response
from planner_api.problems import Problem


def json_answer(
    content: str | bytes | Problem, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON text as an answer, or the problem that came instead."""
    if isinstance(content, Problem):
        return problem_response(content)
    return Response(content, status_code=status, media_type="application/json", headers=dict(headers or {}))


def etag_of(*parts: str) -> str:
    """A strong ETag of what the parts name."""
    return f'"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"'


def unchanged(request: Request, etag: str) -> Response | None:
    """304 where the client has this already."""
    given = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    if etag in given or "*" in given:
        return Response(status_code=304, headers={"ETag": etag})
    return None
