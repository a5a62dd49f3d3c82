"""At most so many requests of one token, or without a valid one of one address, in a time; probes are free."""

from __future__ import annotations

import ipaddress
import math
import time

from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from planner.errors import InputError
from planner.specs.problems import shown
from planner_api.guards.answers import problem_response
from planner_api.guards.tokens import Gate
from planner_api.problems import problem
from planner_api.storage.failures import FAILURES

IPV6_NETWORK_BITS = 64
"""Of an address, how much names the network that one customer is given at least."""
FREE = ("/healthz", "/readyz")


class RateGuard:
    """ASGI middleware; counts in this process."""

    def __init__(self, app: ASGIApp, limit: RateLimitItem) -> None:
        self.app, self.limit = app, limit
        self.window = MovingWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in FREE:
            await self.app(scope, receive, send)
            return
        address = _counted((scope.get("client") or ("unknown", 0))[0])
        token = await self._token(Request(scope), address)
        kind, name = ("address", address) if token is None else ("token", token)
        if await self.window.hit(self.limit, kind, name):
            await self.app(scope, receive, send)
            return
        left = await self.window.get_window_stats(self.limit, kind, name)
        wait = max(1, math.ceil(left.reset_time - time.time()))
        told = problem(
            "too-many-requests",
            f"more than {self.limit} from one {kind}",
            hint=f"ask again in {wait} s; `Prefer: wait` asks less often",
        )
        await problem_response(told, {"Retry-After": str(wait)})(scope, receive, send)

    async def _token(self, request: Request, address: str) -> str | None:
        """Id of the valid token that is sent; an address that has used up its own requests may not have more tokens
        looked up."""
        gate: Gate = request.app.state.services.gate
        looked_up = await self.window.test(self.limit, "address", address)
        try:
            return await gate.token_id(request, look_up=looked_up)
        except FAILURES:
            return None  # the route will say it


def _counted(address: str) -> str:
    """The address, or the network of an IPv6 address: one machine has as many of those as it likes."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    return str(known.ipv4_mapped or ipaddress.ip_network((known, IPV6_NETWORK_BITS), strict=False))


def parsed_limit(text: str) -> RateLimitItem | None:
    """``1200/minute`` as a limit; None for an empty text."""
    if not text.strip():
        return None
    try:
        return parse(text)
    except ValueError as problem:
        raise InputError(
            "this is not a rate",
            where="PLANNER_RATE_LIMIT",
            got=shown(text),
            allowed="a number, a slash and second, minute, hour or day",
            hint="for example 1200/minute",
        ) from problem
