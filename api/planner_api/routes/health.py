"""The state of the service: whether the process lives, whether it can plan, and its numbers for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from planner.version import __version__
from planner_api.openapi import answer, problems
from planner_api.routes.dependencies import Reader, Served
from planner_api.schemas.answers import Health, Readiness

router = APIRouter(tags=["health"])


@router.get("/healthz", responses={**problems(), 200: answer(Health, "The process answers.")}, response_model=None)
async def alive() -> Response:
    """Whether the process answers; nothing else is looked at."""
    return JSONResponse({"status": "ok", "version": __version__}, headers={"Cache-Control": "no-store"})


@router.get(
    "/readyz", response_model=Readiness, responses={**problems(), 503: answer(Readiness, "It cannot plan now.")}
)
async def ready(served: Served) -> Response:
    """Whether plans can be made; the body says what is wrong."""
    checks = {"database": "ok" if await served.database.answers() else "it does not answer"}
    if checks["database"] == "ok":
        waiting = (await served.plans.counts()).get("queued", 0)
        limit = served.settings.queue_limit
        checks["queue"] = "ok" if waiting < limit else f"full: {waiting} plans wait, {limit} may"
    checks["workers"] = "ok" if served.queue.working and served.quick.alive else "none is working"
    checks["service"] = "ending" if served.ending else "ok"
    able = all(state == "ok" for state in checks.values())
    answer_ = Readiness(ready=able, checks=checks)
    return JSONResponse(answer_.model_dump(), status_code=200 if able else 503, headers={"Cache-Control": "no-store"})


@router.get(
    "/metrics",
    response_model=None,
    responses={**problems(), 200: {"description": "Text exposition.", "content": {"text/plain": {}}}},
)
async def metrics(served: Served, _: Reader) -> Response:
    """Numbers for Prometheus."""
    text = served.metrics.text(await served.plans.counts(), await served.plans.ended())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
