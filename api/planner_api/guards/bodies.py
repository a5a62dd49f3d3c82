"""Takes in bodies: not more than allowed, not slower than allowed, and whole before any route sees them."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner_api.guards.answers import problem_response
from planner_api.problems import Problem, problem


class BodyGuard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, limit_bytes: int, timeout_s: float) -> None:
        self.app, self.limit_bytes, self.timeout_s = app, limit_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        if headers is None or not (headers.get("content-length") or headers.get("transfer-encoding")):
            await self.app(scope, receive, send)
            return
        stated = headers.get("content-length", "0")
        refused: Problem | None = None
        body: bytes | None = b""
        if not stated.isascii() or not stated.isdigit() or len(stated) > 18 or int(stated) > self.limit_bytes:
            refused = self._too_large()
        else:
            try:
                async with asyncio.timeout(self.timeout_s):
                    body = await self._collect(receive)
            except TimeoutError:
                refused = problem(
                    "slow-request",
                    f"the body had not arrived after {self.timeout_s:g} s",
                    hint="send the whole body at once; the operator sets the time with PLANNER_BODY_TIMEOUT_S",
                )
            if body is None:
                refused = self._too_large()
        if refused is not None:
            # What is still to come is not read.
            await problem_response(refused, {"Connection": "close"})(scope, receive, send)
            return
        await self.app(scope, _replayed(body or b"", receive), send)

    async def _collect(self, receive: Receive) -> bytes | None:
        """The body, or None where it is larger than allowed."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return bytes(body)
            body += message.get("body", b"")
            if len(body) > self.limit_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> Problem:
        return problem(
            "too-large",
            f"a body may have at most {self.limit_bytes} bytes",
            hint="send less in one request; the operator sets the size with PLANNER_BODY_LIMIT_BYTES",
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then what else comes (the end of the connection)."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
