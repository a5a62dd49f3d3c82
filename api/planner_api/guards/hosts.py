"""Answers only under the service's own names.

Else a foreign page could make a browser on this machine talk to it (DNS rebinding)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from planner_api.guards.answers import problem_response
from planner_api.problems import problem
from planner_api.settings import LOOPBACK

PROBED = ("/healthz", "/readyz")
"""What health checks of the same machine or container ask for, under the loopback's names."""


class HostGuard:
    """ASGI middleware; ``names`` may hold ``*``."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app, self.names = app, tuple(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._known(Headers(scope=scope).get("host", ""), scope["path"]):
            await self.app(scope, receive, send)
            return
        told = problem(
            "wrong-host",
            "the Host header names another service",
            hint="the operator lists the names in PLANNER_ALLOWED_HOSTS",
        )
        await problem_response(told)(scope, receive, send)

    def _known(self, host: str, path: str) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return any(fnmatchcase(name, known) for known in self.names) or (path in PROBED and name in LOOPBACK)
