"""Measured runs that jobs post back, by accelerator and framework."""

from __future__ import annotations

import time

from sqlalchemy import and_, delete, insert, or_, select
from sqlalchemy.exc import IntegrityError

from planner_api.storage.database import Database
from planner_api.storage.tables import measurements

MOST_USED = 500
"""Youngest records that a profile is fitted to."""


class MeasurementStore:
    """The table of measurements."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, identifier: str, accelerator: str, framework: str, record: str) -> bool:
        """False where the same record is there already."""
        values = {"id": identifier, "accelerator": accelerator, "framework": framework, "record": record}
        try:
            async with self._database.begin() as db:
                await db.execute(insert(measurements).values(**values, created_at=time.time()))
        except IntegrityError:
            return False
        return True

    async def of(self, accelerator: str) -> list[tuple[str, str, str]]:
        """(id, framework, record) of an accelerator's youngest records, the youngest first."""
        columns = (measurements.c.id, measurements.c.framework, measurements.c.record)
        query = select(*columns).where(measurements.c.accelerator == accelerator)
        query = query.order_by(measurements.c.created_at.desc(), measurements.c.id).limit(MOST_USED)
        async with self._database.begin() as db:
            return [(row.id, row.framework, row.record) for row in (await db.execute(query)).all()]

    async def page(self, limit: int, before: tuple[float, str] | None) -> list[tuple[float, str, str]]:
        """(created at, id, record), the youngest first."""
        query = select(measurements.c.created_at, measurements.c.id, measurements.c.record)
        query = query.order_by(measurements.c.created_at.desc(), measurements.c.id.desc()).limit(limit)
        if before is not None:
            created, identifier = before
            older = measurements.c.created_at < created
            query = query.where(or_(older, and_(measurements.c.created_at == created, measurements.c.id < identifier)))
        async with self._database.begin() as db:
            return [(row.created_at, row.id, row.record) for row in (await db.execute(query)).all()]

    async def remove(self, identifier: str) -> bool:
        async with self._database.begin() as db:
            done = await db.execute(delete(measurements).where(measurements.c.id == identifier))
        return bool(done.rowcount == 1)
