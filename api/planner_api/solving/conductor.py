"""Carries one plan from the queue to its end: claims it, has it solved, tells how far it is, records what came out."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from pathlib import Path

import structlog

from planner_api.metrics import Metrics
from planner_api.problems import ProblemError, problem
from planner_api.settings import Settings
from planner_api.solving.pool import Pool
from planner_api.solving.tasks import Solved, solve
from planner_api.storage.plans import PlanStore

log = structlog.get_logger(__name__)

BEAT_S = 0.5
"""Between two looks at a running search."""
KILL_AFTER_S = 10.0
"""A search that goes on so long after its own limit is ended from outside."""


class Completions:
    """Tells requests of this process that a plan has ended here."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def tell(self, plan: str) -> None:
        for event in self._waiting.get(plan, ()):
            event.set()

    def tell_all(self) -> None:
        """Nobody waits any longer."""
        for plan in tuple(self._waiting):
            self.tell(plan)

    async def wait(self, plan: str, seconds: float) -> None:
        """Until the plan ends in this process, at most for the time."""
        event = asyncio.Event()
        self._waiting.setdefault(plan, set()).add(event)
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting[plan].discard(event)
            if not self._waiting[plan]:
                del self._waiting[plan]


class Conductor:
    """Works on plans for one process."""

    def __init__(
        self, settings: Settings, store: PlanStore, pool: Pool, metrics: Metrics, completions: Completions
    ) -> None:
        self._settings, self._store, self._pool = settings, store, pool
        self._metrics, self._completions = metrics, completions
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"

    async def conduct(self, plan: str) -> None:
        """Work on a plan to its end, unless somebody else does."""
        question = await self._store.claim(plan, self.worker, self._settings.lost_after_s)
        if question is None:
            return
        started = time.monotonic()
        log.info("plan started", plan=plan)
        try:
            solved = await self._solve(plan, question)
        except asyncio.CancelledError:
            # The service ends: the plan waits for the next one.
            await asyncio.shield(self._store.put_back(plan, self.worker))
            log.info("plan put back", plan=plan)
            raise
        await self._store.finish(
            plan, self.worker, solved.state, outcome=solved.outcome, problem=solved.problem, result=solved.result
        )
        seconds = time.monotonic() - started
        self._metrics.planned(solved.outcome or solved.state, seconds)
        self._completions.tell(plan)
        log.info("plan ended", plan=plan, state=solved.state, outcome=solved.outcome, seconds=round(seconds, 3))

    async def _solve(self, plan: str, question: str) -> Solved:
        limit_s = self._settings.solve_time_limit_s
        with tempfile.TemporaryDirectory(prefix="planner-") as folder:
            progress = Path(folder) / "progress.json"
            work = asyncio.ensure_future(
                self._pool.run(solve, plan, question, str(progress), limit_s, limit_s=limit_s + KILL_AFTER_S)
            )
            try:
                return await self._watched(plan, work, progress)
            except ProblemError as failure:
                return Solved("failed", None, problem=failure.problem.model_dump_json())
            except Exception as failure:
                log.exception("solver failed", plan=plan)
                told = problem("solver-failed", f"the search raised {type(failure).__name__}")
                return Solved("failed", None, problem=told.model_dump_json())
            finally:
                work.cancel()

    async def _watched(self, plan: str, work: asyncio.Future[Solved], progress: Path) -> Solved:
        while True:
            done, _ = await asyncio.wait([work], timeout=BEAT_S)
            if done:
                return work.result()
            if not await self._store.hear(plan, self.worker, _read(progress)):
                return Solved("cancelled", None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
