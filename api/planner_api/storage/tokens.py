"""API tokens: 256 random bits each, of which only the SHA-256 is kept; a scope includes the ones before it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Row, insert, select, update

from planner_api.storage.database import Database
from planner_api.storage.tables import tokens

Scope = Literal["read", "plan", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "plnr"


@dataclass(frozen=True)
class Token:
    """A token as it is kept."""

    id: str
    name: str
    scope: Scope
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def valid(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > time.time())


class TokenStore:
    """The table of tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, scope: Scope, lifetime_s: float | None) -> tuple[Token, str]:
        """A new token and its text, which is told once and kept nowhere."""
        now = time.time()
        token = Token(secrets.token_hex(6), name, scope, now, None if lifetime_s is None else now + lifetime_s, None)
        secret = secrets.token_urlsafe(32)
        async with self._database.begin() as db:
            await db.execute(
                insert(tokens).values(
                    id=token.id,
                    name=name,
                    scope=scope,
                    secret_sha256=_digest(secret),
                    created_at=now,
                    expires_at=token.expires_at,
                )
            )
        return token, f"{PREFIX}_{token.id}_{secret}"

    async def find(self, text: str) -> Token | None:
        """The token of this text, whatever its state; None for anything else."""
        prefix, _, rest = text.partition("_")
        identifier, _, secret = rest.partition("_")
        if prefix != PREFIX or not identifier or len(text) > 200:
            return None
        async with self._database.begin() as db:
            row = (await db.execute(select(tokens).where(tokens.c.id == identifier))).first()
        if row is None or not hmac.compare_digest(row.secret_sha256, _digest(secret)):
            return None
        return _token(row)

    async def all(self) -> list[Token]:
        async with self._database.begin() as db:
            return [_token(row) for row in (await db.execute(select(tokens).order_by(tokens.c.created_at))).all()]

    async def revoke(self, named: str) -> list[str]:
        """Revoke the token of this id, else the valid one of this name; the ids that are meant.

        Nothing is revoked where there are none, or several: names may be given twice."""
        async with self._database.begin() as db:
            kept = select(tokens).where(tokens.c.revoked_at.is_(None))
            found = list((await db.execute(kept.where(tokens.c.id == named))).scalars())
            if not found:
                rows = (await db.execute(kept.where(tokens.c.name == named).order_by(tokens.c.created_at))).all()
                found = [row.id for row in rows if _token(row).valid]
            if len(found) == 1:
                await db.execute(update(tokens).where(tokens.c.id == found[0]).values(revoked_at=time.time()))
        return found


def _digest(secret: str) -> str:
    # Unlike a password the secret is random: nothing is gained by a slow hash.
    return hashlib.sha256(secret.encode()).hexdigest()


def _token(row: Row[Any]) -> Token:
    return Token(row.id, row.name, row.scope, row.created_at, row.expires_at, row.revoked_at)
