"""The ASGI application: routes behind guards, with its services started and ended with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from planner.errors import PlannerError
from planner.report.html import static_dir
from planner.version import __version__
from planner_api import openapi
from planner_api.guards.answers import problem_response
from planner_api.guards.bodies import BodyGuard
from planner_api.guards.heads import HeadGuard
from planner_api.guards.hosts import HostGuard
from planner_api.guards.origins import OriginGuard
from planner_api.guards.rates import RateGuard, parsed_limit
from planner_api.guards.requests import RequestGuard
from planner_api.metrics import Metrics
from planner_api.page import routes as page
from planner_api.page.sending import KeptFiles, PagePacker, page_dir
from planner_api.problems import ProblemError, of_parameters, of_planner_error, problem
from planner_api.routes import artifacts, catalog, checks, estimates, health, measurements, plans
from planner_api.routes.dependencies import known_parameters
from planner_api.services import running
from planner_api.settings import Settings
from planner_api.storage.failures import FAILURES, reason, unable

log = structlog.get_logger(__name__)

ROUTERS = (estimates, plans, artifacts, checks, measurements, catalog, health, page)


def create_app(settings: Settings | None = None, metrics: Metrics | None = None) -> FastAPI:
    """The application; InputError for settings that cannot be used.

    Its services start with its lifespan, or are put into ``app.state.services`` by whoever runs it without.
    """
    settings = settings or Settings()
    metrics = metrics or Metrics()
    limit = parsed_limit(settings.rate_limit)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, metrics) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="parallel-planner",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        generate_unique_id_function=lambda route: f"{route.tags[0] if route.tags else 'page'}-{route.name}",
    )
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    for module in ROUTERS:
        # Probes and the page's addresses may carry what others add to them.
        strict = [] if module in (health, page) else [Depends(known_parameters)]
        app.include_router(module.router, dependencies=strict)
    app.mount("/static/report", KeptFiles(directory=static_dir()))
    app.mount("/static/page", KeptFiles(directory=page_dir()))
    _handle_problems(app)
    # The last one added is the outermost.
    app.add_middleware(PagePacker)
    app.add_middleware(BodyGuard, limit_bytes=settings.body_limit_bytes, timeout_s=settings.body_timeout_s)
    if limit is not None:
        app.add_middleware(RateGuard, limit=limit)
    app.add_middleware(OriginGuard)
    app.add_middleware(HostGuard, names=settings.hosts)
    app.add_middleware(HeadGuard)
    app.add_middleware(RequestGuard, metrics=metrics)
    return app


_OF_STATUS = {
    400: "bad-request",
    404: "not-found",
    405: "method-not-allowed",
    406: "not-acceptable",
    415: "wrong-media-type",
}


def _handle_problems(app: FastAPI) -> None:
    @app.exception_handler(ProblemError)
    async def _ours(_: Request, error: ProblemError) -> Response:
        return problem_response(error.problem, error.headers)

    @app.exception_handler(PlannerError)
    async def _library(_: Request, error: PlannerError) -> Response:
        return problem_response(of_planner_error(error))

    @app.exception_handler(RequestValidationError)
    async def _parameters(_: Request, error: RequestValidationError) -> Response:
        return problem_response(of_parameters(error.errors()))

    async def _database(_: Request, error: Exception) -> Response:
        log.warning("database does not answer", error=reason(error))
        told = unable(error)
        return problem_response(told.problem, told.headers)

    for failure in FAILURES:
        app.add_exception_handler(failure, _database)

    @app.exception_handler(HTTPException)
    async def _framework(request: Request, error: HTTPException) -> Response:
        code = _OF_STATUS.get(error.status_code, "bad-request")
        detail = f"{request.method} {request.url.path[:200]}" if code != "bad-request" else str(error.detail)[:200]
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(sorted(_methods(request)))
        return problem_response(problem(code, detail, hint="/openapi.json describes every request"), headers)


def _methods(request: Request) -> set[str]:
    """Every method of the address; the framework names those of its first route only."""
    # Each module's own routes: what the app makes of an included router is the framework's affair.
    known = [*request.app.routes, *(route for module in ROUTERS for route in module.router.routes)]
    routes = [route for route in known if route.matches(request.scope)[0] is not Match.NONE]
    found = {method for route in routes for method in getattr(route, "methods", None) or ()} or {"GET"}
    return found | {"HEAD"} if "GET" in found else found
