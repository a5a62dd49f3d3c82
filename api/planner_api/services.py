"""Everything that the routes of one app share, made once and closed once."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
from cachetools import LRUCache

from planner.errors import InputError
from planner_api.guards.tokens import Gate
from planner_api.metrics import Metrics
from planner_api.settings import Settings
from planner_api.solving.conductor import Completions, Conductor
from planner_api.solving.keeping import keep_house
from planner_api.solving.pool import Pool
from planner_api.solving.queues import EmbeddedQueue, PlanQueue, PostgresQueue
from planner_api.storage.database import Database
from planner_api.storage.idempotency import IdempotencyStore
from planner_api.storage.measurements import MeasurementStore
from planner_api.storage.plans import PlanStore
from planner_api.storage.tokens import TokenStore

log = structlog.get_logger(__name__)

QUICK_PROCESSES = 2
"""For estimates, checks and renderings, beside the searches."""


@dataclass
class Services:
    """Of one app in one process."""

    settings: Settings
    metrics: Metrics
    database: Database
    plans: PlanStore
    tokens: TokenStore
    measurements: MeasurementStore
    idempotency: IdempotencyStore
    completions: Completions
    quick: Pool
    queue: PlanQueue
    gate: Gate
    finished: LRUCache[str, bytes]
    """Plans that were asked for lately: id -> the answer's body."""
    rendered: LRUCache[tuple[str, int, str], dict[str, str]] = field(default_factory=lambda: LRUCache(maxsize=64))
    """(plan, rank, launcher) -> files."""
    sections: LRUCache[tuple[str, int], str] = field(default_factory=lambda: LRUCache(maxsize=64))
    """(plan, rank) -> the part of the page."""
    ending: bool = False

    def forget(self, plan: str) -> None:
        """The plan is made anew: nothing that is remembered of it holds."""
        self.finished.pop(plan, None)
        for file in [key for key in self.rendered if key[0] == plan]:
            self.rendered.pop(file, None)
        for section in [key for key in self.sections if key[0] == plan]:
            self.sections.pop(section, None)

    def end(self) -> None:
        """Nothing new is accepted, and whoever waits for a plan is answered with what there is."""
        self.ending = True
        self.completions.tell_all()


@asynccontextmanager
async def running(settings: Settings, metrics: Metrics) -> AsyncIterator[Services]:
    """The services, started; at the end searches get their grace and everything is closed."""
    database = Database(settings.database)
    database.lock()
    try:
        await database.migrate()
        plans = PlanStore(database)
        completions = Completions()
        quick = Pool(QUICK_PROCESSES, settings.solve_memory_bytes, "PLANNER_QUICK_TIME_LIMIT_S")
        searches = Pool(max(settings.workers, 1), settings.solve_memory_bytes, "PLANNER_SOLVE_TIME_LIMIT_S")
        conductor = Conductor(settings, plans, searches, metrics, completions)
        queue: PlanQueue = (
            EmbeddedQueue(settings.workers, plans, conductor.conduct)
            if database.is_sqlite
            else PostgresQueue(settings, plans, conductor.conduct)
        )
        tokens = TokenStore(database)
        services = Services(
            settings=settings,
            metrics=metrics,
            database=database,
            plans=plans,
            tokens=tokens,
            measurements=MeasurementStore(database),
            idempotency=IdempotencyStore(database),
            completions=completions,
            quick=quick,
            queue=queue,
            gate=Gate(tokens, required=settings.tokens_required),
            finished=LRUCache(maxsize=max(settings.cache_bytes, 1), getsizeof=len),
        )
        try:
            await _start(quick, *([searches] if settings.workers else []))
            await queue.start()
            async with keep_house(services.plans, services.idempotency, settings.result_lifetime_s):
                log.info("started", workers=settings.workers, database=database.url.get_backend_name())
                yield services
        finally:
            services.end()
            await queue.stop(settings.shutdown_grace_s)
            await searches.stop()
            await quick.stop()
            log.info("ended")
    finally:
        await database.close()


async def _start(*pools: Pool) -> None:
    try:
        for pool in pools:
            await pool.start()
    except OSError as problem:
        raise InputError(
            f"processes for the searches cannot be started: {problem}",
            where="planner serve",
            got=f"TMPDIR={tempfile.gettempdir()}",
            hint="a folder for temporary files needs a short path, and room",
        ) from problem
