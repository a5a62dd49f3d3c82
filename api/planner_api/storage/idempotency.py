"""Idempotency keys: one key stands for one request of one caller."""

from __future__ import annotations

import time
from typing import Literal

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from planner_api.storage.database import Database
from planner_api.storage.tables import idempotency_keys as keys

LIFETIME_S = 24 * 3600.0
IN_PROGRESS_S = 120.0
"""Longer than any request is held: an unanswered key that is older belongs to a process that is gone."""

Verdict = Literal["new", "same", "in-progress", "other-request"]


class IdempotencyStore:
    """The table of keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, owner: str, key: str, body_sha256: str) -> Verdict:
        """Whether the request may go on: it is new, or a repetition of one that was answered."""
        values = {"owner": owner, "key": key, "body_sha256": body_sha256, "answered": False}
        try:
            async with self._database.begin() as db:
                await db.execute(insert(keys).values(**values, created_at=time.time()))
            return "new"
        except IntegrityError:
            pass
        mine = (keys.c.owner == owner) & (keys.c.key == key)
        async with self._database.begin() as db:
            known = (await db.execute(select(keys).where(mine))).first()
        if known is None:
            return "new"
        if known.body_sha256 != body_sha256:
            return "other-request"
        fresh = time.time() - known.created_at < IN_PROGRESS_S
        return "same" if known.answered or not fresh else "in-progress"

    async def end(self, owner: str, key: str, *, answered: bool) -> None:
        """The request was answered; where it was refused, the key is free again."""
        mine = (keys.c.owner == owner) & (keys.c.key == key)
        async with self._database.begin() as db:
            await db.execute(update(keys).where(mine).values(answered=True) if answered else delete(keys).where(mine))

    async def forget(self) -> None:
        async with self._database.begin() as db:
            await db.execute(delete(keys).where(keys.c.created_at < time.time() - LIFETIME_S))
