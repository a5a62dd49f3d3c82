"""Which plan is worked on next, by whom: within one process on SQLite, among all processes on PostgreSQL.

The state of a plan stands in the table of plans; a queue only brings ids to workers, and may bring one twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Protocol

import procrastinate
import structlog
from procrastinate.exceptions import AlreadyEnqueued, ConnectorException
from procrastinate.jobs import Status
from sqlalchemy.engine import URL

from planner_api.problems import problem
from planner_api.settings import Settings
from planner_api.storage.database import patient
from planner_api.storage.failures import reason
from planner_api.storage.plans import PlanStore

log = structlog.get_logger(__name__)

Conduct = Callable[[str], Awaitable[None]]
QUEUE = "plans"
ANSWER_S = 3.0
"""A queue without a connection for so long does not answer."""
END_S = 20.0
"""Longest wait for what has to be told to a queue at the end."""
AGAIN_S = 1.0
"""Before a queue that does not answer is asked again."""
_GIVEN_UP = problem(
    "solver-failed", "two workers in a row were lost with this plan", hint="it may take too much memory: narrow it"
).model_dump_json()


class PlanQueue(Protocol):
    """Brings ids of plans to ``conduct``."""

    async def start(self) -> None: ...

    async def put(self, plan: str) -> None: ...

    async def stop(self, grace_s: float) -> None:
        """End: work in progress may go on for ``grace_s``, then it is cancelled."""

    @property
    def working(self) -> bool:
        """Whether plans are taken up (anywhere, as far as this process knows)."""


class EmbeddedQueue:
    """For the one process that has an SQLite database."""

    def __init__(self, workers: int, store: PlanStore, conduct: Conduct) -> None:
        self._workers, self._store, self._conduct = workers, store, conduct
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy: set[int] = set()

    async def start(self) -> None:
        # No other process can be working on anything: what runs was left by one that is gone.
        await self._store.given_up(None, _GIVEN_UP)
        for plan in await self._store.put_back_lost(None):
            self._waiting.put_nowait(plan)
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(self._workers)]

    async def put(self, plan: str) -> None:
        self._waiting.put_nowait(plan)

    async def _work(self, number: int) -> None:
        while True:
            plan = await self._waiting.get()
            self._busy.add(number)
            try:
                await self._conduct(plan)
            except Exception:
                # The plan is found at the next start; what failed is not the search, which tells its failures.
                log.exception("worker failed", plan=plan)
            finally:
                self._busy.discard(number)

    async def stop(self, grace_s: float) -> None:
        idle = [task for number, task in enumerate(self._tasks) if number not in self._busy]
        busy = [task for task in self._tasks if task not in idle]
        for task in idle:
            task.cancel()
        # Whoever is busy takes nothing new up: what waits stands in the table.
        self._waiting = asyncio.Queue()
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for task in busy:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def working(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)


class PostgresQueue:
    """For any number of processes, through the database."""

    def __init__(self, settings: Settings, store: PlanStore, conduct: Conduct) -> None:
        self._settings, self._store = settings, store
        self._app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(
                conninfo=_conninfo(settings.database), max_size=settings.workers + 4, timeout=ANSWER_S
            )
        )
        self._conduct = conduct
        self._task = self._app.task(name="plan", queue=QUEUE, pass_context=False)(self._carry)
        self._open = AsyncExitStack()
        self._worker: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._ending = False

    async def start(self) -> None:
        await self._open.enter_async_context(self._app.open_async())
        if self._settings.workers:
            self._worker = asyncio.create_task(self._work())
            self._sweeper = asyncio.create_task(self._sweep())

    async def put(self, plan: str) -> None:
        try:
            await self._task.configure(queueing_lock=plan).defer_async(plan=plan)
        except AlreadyEnqueued:
            pass
        except ConnectorException as problem:
            # The plan stands in the table: the sweep of a worker brings it.
            log.warning("the queue does not answer", plan=plan, error=reason(problem))

    async def _carry(self, plan: str) -> None:
        try:
            await self._conduct(plan)
        except asyncio.CancelledError:
            # This worker ends: another one need not wait for the sweep.
            with suppress(Exception):
                await asyncio.shield(self.put(plan))
            raise

    async def _work(self) -> None:
        """Take plans from the queue; where the database went away, as soon as it is back."""
        silent = self._settings.lost_after_s
        while not self._ending:  # a worker that cannot say goodbye raises that instead of its cancellation
            try:
                await self._app.run_worker_async(
                    queues=[QUEUE],
                    concurrency=self._settings.workers,
                    install_signal_handlers=False,
                    delete_jobs="always",
                    shutdown_graceful_timeout=self._settings.shutdown_grace_s,
                    update_heartbeat_interval=silent / 3,
                    stalled_worker_timeout=silent,
                )
            except Exception as problem:
                log.warning("the queue does not answer", error=reason(problem), again_in_s=AGAIN_S)
            await asyncio.sleep(AGAIN_S)

    async def _sweep(self) -> None:
        """Give plans of lost workers to others, and bring plans to the queue that a killed process had no time to."""
        silent = self._settings.lost_after_s
        while True:
            try:
                await self._sweep_once(silent)
            except Exception as problem:
                log.warning("sweep failed", error=reason(problem))
            await asyncio.sleep(silent / 3)

    async def _sweep_once(self, silent: float) -> None:
        jobs = self._app.job_manager
        for job in await jobs.get_stalled_jobs(seconds_since_heartbeat=silent):
            # Whether its plan is done again, the table of plans says.
            await jobs.finish_job(job, status=Status.ABORTED, delete_job=True)
        await self._store.given_up(silent, _GIVEN_UP)
        waiting = await self._store.put_back_lost(silent)
        queued = {job.queueing_lock for job in await jobs.list_jobs_async(queue=QUEUE, status="todo")}
        for plan in waiting:
            if plan not in queued:
                await self.put(plan)

    async def stop(self, grace_s: float) -> None:
        self._ending = True
        # The first cancellation lets a worker finish what it has begun, within the grace that it was started with.
        for task, longest_s in ((self._sweeper, END_S), (self._worker, grace_s + END_S)):
            if task is not None:
                task.cancel()
                await asyncio.wait([task], timeout=longest_s)
        try:
            async with asyncio.timeout(END_S):
                await self._open.aclose()
        except Exception as problem:
            log.warning("the queue does not answer", error=reason(problem))

    @property
    def working(self) -> bool:
        return self._worker is None or not self._worker.done()


def _conninfo(url: URL) -> str:
    """The database for a driver that does not know SQLAlchemy's names."""
    return patient(url).set(drivername="postgresql").render_as_string(hide_password=False)
