"""The outermost guard: gives every request its id, log line, metrics and security headers, and turns bugs into
problems."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner_api.guards.answers import problem_response
from planner_api.guards.identity import begin_request
from planner_api.metrics import Metrics
from planner_api.problems import problem

log = structlog.get_logger(__name__)

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}
QUIET = ("/healthz", "/readyz", "/metrics")
"""Asked for every few seconds: logged only when they fail."""


class RequestGuard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identifier = begin_request(Headers(scope=scope).get("x-request-id"))
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=identifier)
        started, status = time.perf_counter(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                _add_headers(message, identifier)
            await send(message)

        try:
            await self.app(scope, receive, tell)
        except Exception:
            log.exception("request failed")
            if status:
                raise
            told = problem("internal-error", "the service has a fault", hint="report it with the id of the request")
            await problem_response(told)(scope, receive, tell)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # The template of the route, not the path: ids and names of others are no labels.
        route = getattr(scope.get("route"), "path", "none")
        self.metrics.answered(_method(scope), route, status, seconds)
        if route not in QUIET or status >= 400:
            log.info(
                "request", method=_method(scope), route=route, status=status, milliseconds=round(1000 * seconds, 1)
            )


def _method(scope: MutableMapping[str, Any]) -> str:
    """A known method, or ``other``: whatever a client sends is no label."""
    method = str(scope["method"])
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"


def _add_headers(message: Message, identifier: str) -> None:
    headers = MutableHeaders(scope=message)
    headers["X-Request-ID"] = identifier
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
