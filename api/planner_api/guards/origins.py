"""Lets only the service's own pages change anything from a browser.

Programs send neither of the headers that are looked at; browsers send them and no page can forge them."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from planner_api.guards.answers import problem_response
from planner_api.problems import problem

READING = ("GET", "HEAD", "OPTIONS")


class OriginGuard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _foreign(scope["method"], Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        told = problem("foreign-page", "the request comes from a page of another site", hint="open the service's page")
        await problem_response(told)(scope, receive, send)


def _foreign(method: str, headers: Headers) -> bool:
    site = headers.get("sec-fetch-site")
    if method in READING:
        # Links from other sites open the page; pictures and frames there do not make it plan.
        return site == "cross-site" and headers.get("sec-fetch-dest", "document") != "document"
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
