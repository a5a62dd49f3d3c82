"""The connection to the database, and bringing its tables up to date."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from planner.errors import InputError
from planner.specs.problems import shown

MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x706C616E
"""Key of the advisory lock under which one process of several migrates ("plan")."""
POOL = 10
ANSWER_S = 5.0
"""A database that does not answer a probe for so long counts as away."""
_PATIENCE = {"connect_timeout": "10", "tcp_user_timeout": "30000"}
"""Of connections to PostgreSQL (seconds, milliseconds): a machine that vanished must not hold requests for minutes."""


class Database:
    """One database; SQLite belongs to one process at a time."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._lock: IO[str] | None = None
        if self.is_sqlite:
            self._prepare_file()
        self.engine = _engine(url, self.is_sqlite)

    def _prepare_file(self) -> None:
        if self.url.database in (None, "", ":memory:"):
            raise InputError(
                "a database in memory is gone with the process",
                where="PLANNER_DATABASE_URL",
                allowed="sqlite:///FILE",
                hint="name a file",
            )
        try:
            Path(self.url.database or "").parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.url.database or "")) as connection:
                connection.execute("PRAGMA schema_version")
        except OSError as problem:
            raise _unusable(self.url, problem.strerror or str(problem)) from problem
        except sqlite3.Error as problem:
            raise _unusable(self.url, str(problem)) from problem

    def lock(self) -> None:
        """Claim an SQLite file for this process; nothing to do on PostgreSQL."""
        if not self.is_sqlite:
            return
        path = f"{self.url.database}.lock"
        try:
            self._lock = open(path, "a", encoding="ascii")  # noqa: SIM115 - held as long as the process lives
            os.chmod(path, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another service has this database open",
                where="PLANNER_DATABASE_URL",
                got=shown(self.url.database),
                hint="end the other one, name another file, or use PostgreSQL for several processes",
            ) from None
        except OSError as problem:
            raise _unusable(self.url, problem.strerror or str(problem)) from problem

    async def migrate(self) -> None:
        """Bring the tables to this version; several processes may ask at once."""
        try:
            async with self.engine.begin() as connection:
                if not self.is_sqlite:
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
                await connection.run_sync(_upgrade)
        except (DBAPIError, OSError) as problem:
            raise _unusable(self.url, str(getattr(problem, "orig", problem)).strip().split("\n")[0]) from problem
        if self.is_sqlite:
            os.chmod(self.url.database or "", 0o600)

    def begin(self) -> Any:
        """A transaction."""
        return self.engine.begin()

    async def answers(self) -> bool:
        """Whether a query gets through."""
        try:
            async with asyncio.timeout(ANSWER_S), self.engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except (DBAPIError, NoConnectionError, OSError):
            return False
        return True

    async def close(self) -> None:
        await self.engine.dispose()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _engine(url: URL, is_sqlite: bool) -> AsyncEngine:
    if not is_sqlite:
        return create_async_engine(patient(url), pool_size=POOL, max_overflow=POOL, pool_pre_ping=True, pool_timeout=20)
    engine = create_async_engine(url, connect_args={"timeout": 20})

    @event.listens_for(engine.sync_engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        # Readers do not wait for the writer, and a killed process loses no finished transaction.
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    return engine


def patient(url: URL) -> URL:
    """A PostgreSQL address with limits on waiting, where it has none of its own."""
    return url.update_query_dict({name: value for name, value in _PATIENCE.items() if name not in url.query})


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _unusable(url: URL, reason: str) -> InputError:
    return InputError(
        f"the database cannot be used: {reason}",
        where="PLANNER_DATABASE_URL",
        # Drivers take a password among the options, too.
        got=shown(url.set(query={}).render_as_string(hide_password=True)),
        hint="check that it exists, that it runs and that this user may write to it",
    )


__all__ = ["AsyncConnection", "Database"]
