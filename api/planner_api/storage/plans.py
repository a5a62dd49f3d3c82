"""Plans and their states: queued -> running -> succeeded, failed or cancelled.

Every change is one statement with the state it needs in its condition, so that two processes cannot both make it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from planner_api.storage.database import Database
from planner_api.storage.tables import plans

MAX_ATTEMPTS = 2
"""A plan whose worker was lost is tried once more."""
FINISHED = ("succeeded", "failed", "cancelled")
_STATUS = tuple(column for column in plans.c if column.name not in ("question", "result"))


@dataclass(frozen=True)
class PlanRow:
    """One plan without its question and its result."""

    id: str
    state: str
    outcome: str | None
    attempts: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    heard_at: float | None
    worker: str | None
    cancel: bool
    progress: str | None
    problem: str | None
    cut_at_s: float | None

    @property
    def finished(self) -> bool:
        return self.state in FINISHED


class QueueFullError(Exception):
    """As many plans wait as may."""


class PlanStore:
    """The table of plans."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def accept(self, plan: str, question: str, queue_limit: int, limit_s: float) -> tuple[PlanRow, bool]:
        """The plan of this id, and whether it was put into the queue now: it is new, failed or was cancelled before, or
        was cut short by a limit below ``limit_s``.

        Raises QueueFullError."""
        ended_badly = or_(plans.c.state.in_(("failed", "cancelled")), plans.c.cut_at_s < limit_s)
        wanted = and_(plans.c.id == plan, plans.c.state.in_(FINISHED), ended_badly)
        async with self._database.begin() as db:
            known = (await db.execute(select(*_STATUS).where(plans.c.id == plan))).first()
            if known is not None and await db.scalar(select(plans.c.id).where(wanted)) is None:
                if known.cancel:
                    # Whoever cancelled it a moment ago did not know that somebody still wants it.
                    await db.execute(update(plans).where(plans.c.id == plan, plans.c.cancel).values(cancel=False))
                return _row(known), False
            waiting = await db.scalar(select(func.count()).where(plans.c.state == "queued"))
            if waiting is not None and waiting >= queue_limit:
                raise QueueFullError
            fresh = {
                "state": "queued", "outcome": None, "attempts": 0, "created_at": time.time(), "started_at": None,
                "finished_at": None, "heard_at": None, "worker": None, "cancel": False, "progress": None,
                "problem": None, "result": None, "cut_at_s": None,
            }  # fmt: skip
            try:
                async with db.begin_nested():
                    if known is None:
                        await db.execute(insert(plans).values(id=plan, question=question, **fresh))
                        put = True
                    else:
                        put = (await db.execute(update(plans).where(wanted).values(**fresh))).rowcount == 1
            except IntegrityError:
                put = False  # another process was first
            row = (await db.execute(select(*_STATUS).where(plans.c.id == plan))).one()
        return _row(row), put

    async def claim(self, plan: str, worker: str, lost_after_s: float) -> str | None:
        """Start work on a plan that waits, or whose worker has been silent: its question, or None."""
        now = time.time()
        free = or_(plans.c.state == "queued", _lost(lost_after_s))
        claimed = (
            update(plans)
            .where(plans.c.id == plan, free, plans.c.attempts < MAX_ATTEMPTS)
            .values(
                state="running", attempts=plans.c.attempts + 1, started_at=now, heard_at=now, worker=worker,
                progress=None, cancel=False,
            )
            .returning(plans.c.question)
        )  # fmt: skip
        async with self._database.begin() as db:
            question: str | None = await db.scalar(claimed)
        return question

    async def hear(self, plan: str, worker: str, progress: str | None) -> bool:
        """A sign of life with how far the search is; False when this worker should stop."""
        values: dict[str, Any] = {"heard_at": time.time()}
        if progress is not None:
            values["progress"] = progress
        mine = and_(plans.c.id == plan, plans.c.worker == worker, plans.c.state == "running")
        async with self._database.begin() as db:
            cancel = await db.scalar(update(plans).where(mine).values(**values).returning(plans.c.cancel))
        return cancel is not None and not cancel

    async def finish(
        self,
        plan: str,
        worker: str,
        state: str,
        *,
        outcome: str | None = None,
        problem: str | None = None,
        result: str | None = None,
        cut_at_s: float | None = None,
    ) -> bool:
        """The end of a plan, as far as it is still this worker's."""
        mine = and_(plans.c.id == plan, plans.c.worker == worker, plans.c.state == "running")
        ended = {"state": state, "outcome": outcome, "problem": problem, "result": result, "cut_at_s": cut_at_s}
        return await self._change(mine, **ended, finished_at=time.time())

    async def end_cancelled(self, plan: str, worker: str) -> bool:
        """The end of a plan that was cancelled, unless it was asked for again before its worker had stopped."""
        mine = and_(plans.c.id == plan, plans.c.worker == worker, plans.c.state == "running", plans.c.cancel)
        return await self._change(mine, state="cancelled", finished_at=time.time())

    async def put_back(self, plan: str, worker: str) -> bool:
        """Leave an unfinished plan to another worker, or to this one after a restart; it does not count as an
        attempt."""
        mine = and_(plans.c.id == plan, plans.c.worker == worker, plans.c.state == "running")
        return await self._change(mine, state="queued", attempts=plans.c.attempts - 1, worker=None)

    async def lose(self, plan: str, worker: str) -> bool:
        """The solver process was lost: the plan waits again; False where that was its last attempt."""
        mine = and_(plans.c.id == plan, plans.c.worker == worker, plans.c.state == "running")
        return await self._change(and_(mine, plans.c.attempts < MAX_ATTEMPTS), state="queued", worker=None)

    async def _change(self, where: ColumnElement[bool], **values: Any) -> bool:
        async with self._database.begin() as db:
            done = await db.execute(update(plans).where(where).values(**values))
        return bool(done.rowcount == 1)

    async def put_back_lost(self, lost_after_s: float | None) -> list[str]:
        """Every running plan whose worker is silent for so long (None: every one) waits again; ids of all plans that
        wait."""
        lost = _lost(lost_after_s)
        async with self._database.begin() as db:
            await db.execute(update(plans).where(lost, plans.c.attempts < MAX_ATTEMPTS).values(state="queued"))
            waiting = select(plans.c.id).where(plans.c.state == "queued").order_by(plans.c.created_at)
            return list((await db.execute(waiting)).scalars())

    async def given_up(self, lost_after_s: float | None, problem: str) -> int:
        """Plans whose second worker was lost, too, have failed; how many."""
        lost = and_(or_(plans.c.state == "queued", _lost(lost_after_s)), plans.c.attempts >= MAX_ATTEMPTS)
        ended = update(plans).where(lost).values(state="failed", problem=problem, finished_at=time.time())
        async with self._database.begin() as db:
            return int((await db.execute(ended)).rowcount)

    async def cancel(self, plan: str) -> PlanRow | None:
        """A waiting plan is cancelled at once, a running one as soon as its worker hears of it."""
        async with self._database.begin() as db:
            waiting = and_(plans.c.id == plan, plans.c.state == "queued")
            await db.execute(update(plans).where(waiting).values(state="cancelled", finished_at=time.time()))
            running = and_(plans.c.id == plan, plans.c.state == "running")
            await db.execute(update(plans).where(running).values(cancel=True))
            row = (await db.execute(select(*_STATUS).where(plans.c.id == plan))).first()
        return None if row is None else _row(row)

    async def get(self, plan: str) -> PlanRow | None:
        async with self._database.begin() as db:
            row = (await db.execute(select(*_STATUS).where(plans.c.id == plan))).first()
        return None if row is None else _row(row)

    async def result(self, plan: str) -> str | None:
        """The document of a finished plan."""
        async with self._database.begin() as db:
            text: str | None = await db.scalar(select(plans.c.result).where(plans.c.id == plan))
        return text

    async def questions(self, ids: Collection[str]) -> dict[str, str]:
        """Of each plan what was asked, as it was put."""
        query = select(plans.c.id, plans.c.question).where(plans.c.id.in_(ids))
        async with self._database.begin() as db:
            return {row.id: row.question for row in await db.execute(query)}

    async def page(self, limit: int, before: tuple[float, str] | None) -> list[PlanRow]:
        """Plans, the youngest first, from behind the one that was created at ``before``."""
        query = select(*_STATUS).order_by(plans.c.created_at.desc(), plans.c.id.desc()).limit(limit)
        if before is not None:
            created, plan = before
            query = query.where(
                or_(plans.c.created_at < created, and_(plans.c.created_at == created, plans.c.id < plan))
            )
        async with self._database.begin() as db:
            return [_row(row) for row in (await db.execute(query)).all()]

    async def counts(self) -> dict[str, int]:
        """How many plans are in which state."""
        async with self._database.begin() as db:
            rows = await db.execute(select(plans.c.state, func.count()).group_by(plans.c.state))
            return {str(state): int(count) for state, count in rows.all()}

    async def ended(self) -> dict[str, int]:
        """How many plans have ended with which outcome, or in which state where there is none."""
        outcome = func.coalesce(plans.c.outcome, plans.c.state)
        async with self._database.begin() as db:
            rows = await db.execute(select(outcome, func.count()).where(plans.c.state.in_(FINISHED)).group_by(outcome))
            return {str(name): int(count) for name, count in rows.all()}

    async def forget(self, older_than_s: float) -> int:
        """Finished plans that are older are gone; how many."""
        old = and_(plans.c.state.in_(FINISHED), plans.c.finished_at < time.time() - older_than_s)
        async with self._database.begin() as db:
            return int((await db.execute(delete(plans).where(old))).rowcount)


def _lost(after_s: float | None) -> ColumnElement[bool]:
    running = plans.c.state == "running"
    return running if after_s is None else and_(running, plans.c.heard_at <= time.time() - after_s)


def _row(row: Row[Any]) -> PlanRow:
    return PlanRow(**row._mapping)
