"""Who asks: the bearer of a token (also from the page's cookie), or anybody where no tokens are needed."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from cachetools import TTLCache
from starlette.requests import Request

from planner_api.problems import ProblemError
from planner_api.storage.tokens import SCOPES, Scope, Token, TokenStore

COOKIE = "planner_token"
REMEMBERED_S = 5.0
"""A token that was revoked is refused after at most so long."""
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="planner"'}


@dataclass(frozen=True)
class Caller:
    """Whoever sent the request."""

    id: str
    scope: Scope

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


ANYBODY = Caller("anybody", "admin")


class Gate:
    """Lets requests in by their token."""

    def __init__(self, store: TokenStore, *, required: bool) -> None:
        self._store, self._required = store, required
        self._known: TTLCache[str, Token] = TTLCache(maxsize=1000, ttl=REMEMBERED_S)

    async def admit(self, request: Request, scope: Scope) -> Caller:
        """The caller; ProblemError 401 without a usable token, 403 where it does not allow this."""
        if not self._required:
            return ANYBODY
        token = await self._token(request)
        structlog.contextvars.bind_contextvars(token=token.id)
        if not token.allows(scope):
            raise ProblemError(
                "wrong-scope",
                f"the token has the scope {token.scope}, this needs {scope}",
                hint="`planner tokens create NAME --scope SCOPE` makes another",
            )
        return Caller(token.id, token.scope)

    async def token_id(self, request: Request, *, look_up: bool) -> str | None:
        """Id of the valid token that is sent, None where there is none or none is needed; one that is not remembered
        is looked up only where that is allowed."""
        text = _bearer(request) if self._required else None
        if text is None or not (look_up or text in self._known):
            return None
        token = await self._find(text)
        return token.id if token is not None and token.valid else None

    async def _token(self, request: Request) -> Token:
        text = _bearer(request)
        if text is None:
            raise ProblemError(
                "no-token",
                "the request has no token",
                hint="send `Authorization: Bearer TOKEN`; `planner tokens create` makes one",
                headers=_CHALLENGE,
            )
        token = await self._find(text)
        if token is None or not token.valid:
            why = "is not known" if token is None else "was revoked" if token.revoked_at else "has expired"
            raise ProblemError("no-token", f"the token {why}", hint="ask for a new one", headers=_CHALLENGE)
        return token

    async def _find(self, text: str) -> Token | None:
        """The token of this text; valid ones are remembered."""
        remembered = self._known.get(text)
        token = remembered or await self._store.find(text)
        # Storing it again would start its time anew, and a revoked token that is in use would never end.
        if remembered is None and token is not None and token.valid:
            self._known[text] = token
        return token


def _bearer(request: Request) -> str | None:
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and text.strip():
        return text.strip()
    # A browser sends the cookie by itself; it is SameSite=Strict, and other sites' pages cannot send JSON here.
    return request.cookies.get(COOKIE) or None
