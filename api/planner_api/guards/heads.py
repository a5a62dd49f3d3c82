"""HEAD is answered wherever GET is, with the same headers and no body (RFC 9110, 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadGuard:
    """ASGI middleware: what is inside of it sees GET."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # The server goes by its own scope when it sends.
        inside = {**scope, "method": "GET"}
        try:
            await self.app(inside, receive, without_body)
        finally:
            if "route" in inside:
                scope["route"] = inside["route"]
