"""Carries one plan from the queue to its end: claims it, has it solved, tells how far it is, records what came out."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from planner_api.metrics import Metrics
from planner_api.problems import TOO_LONG, ProblemError, problem
from planner_api.settings import Settings
from planner_api.solving.pool import LostError, Pool
from planner_api.solving.tasks import SOLVE_LIMIT, Solved, solve
from planner_api.storage.failures import AWAY, reason
from planner_api.storage.plans import PlanStore

log = structlog.get_logger(__name__)

BEAT_S = 0.5
"""Between two looks at a running search."""
KILL_AFTER_S = 10.0
"""A search that goes on so long after its own limit is ended from outside."""
LONGEST_PAUSE_S = 5.0
"""Between two attempts to write to a database that is away."""

Answer = TypeVar("Answer")


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
        claim = partial(_persist, self._store.claim, plan, self.worker, self._settings.lost_after_s)
        while (question := await claim()) is not None:
            started = time.monotonic()
            log.info("plan started", plan=plan)
            try:
                ended = await self._end(plan, await self._solve(plan, question), started)
            except asyncio.CancelledError:
                # The service ends: the plan waits for the next one.
                await asyncio.shield(self._leave(plan))
                raise
            if ended:
                return

    async def _leave(self, plan: str) -> None:
        try:
            await self._store.put_back(plan, self.worker)
            log.info("plan put back", plan=plan)
        except AWAY as problem:
            # It is found by its silence; only the attempt counts.
            log.warning("plan not put back", plan=plan, error=reason(problem))

    async def _end(self, plan: str, solved: Solved | LostError | None, started: float) -> bool:
        """Record what came out; False where the plan should be taken up again."""
        if isinstance(solved, LostError):
            if await _persist(self._store.lose, plan, self.worker):
                log.warning("solver lost, plan is tried again", plan=plan, why=str(solved))
                return False
            solved = Solved("failed", None, problem=solved.problem.model_dump_json())
        if solved is None:
            # Cancelled, unless somebody asked for it again meanwhile; or another worker's by now.
            if await _persist(self._store.end_cancelled, plan, self.worker):
                solved = Solved("cancelled", None)
            else:
                return not await _persist(self._store.put_back, plan, self.worker)
        elif not await _persist(
            self._store.finish,
            plan,
            self.worker,
            solved.state,
            outcome=solved.outcome,
            problem=solved.problem,
            result=solved.result,
            cut_at_s=solved.cut_at_s,
        ):
            log.warning("plan was given to another worker meanwhile", plan=plan)
            return True
        seconds = time.monotonic() - started
        self._metrics.planned(solved.outcome or solved.state, seconds)
        self._completions.tell(plan)
        log.info("plan ended", plan=plan, state=solved.state, outcome=solved.outcome, seconds=round(seconds, 3))
        return True

    async def _solve(self, plan: str, question: str) -> Solved | LostError | None:
        """How the search ended; the error where its process was lost; None where this worker should stop."""
        limit_s = self._settings.solve_time_limit_s
        told: list[str | None] = [None]

        def hear(text: str) -> None:
            told[0] = text

        work = asyncio.ensure_future(
            self._pool.run(solve, plan, question, limit_s, limit_s=limit_s + KILL_AFTER_S, hear=hear)
        )
        try:
            while not (await asyncio.wait([work], timeout=BEAT_S))[0]:
                if not await self._heard(plan, told[0]):
                    return None
            return work.result()
        except LostError as lost:
            return lost
        except ProblemError as failure:
            if failure.problem.type == TOO_LONG:
                return _out_of_time(limit_s)
            return Solved("failed", None, problem=failure.problem.model_dump_json())
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _heard(self, plan: str, progress: str | None) -> bool:
        """Whether to go on; a database that is away for a moment ends no search."""
        try:
            return await self._store.hear(plan, self.worker, progress)
        except AWAY as problem:
            log.warning("database does not answer", plan=plan, error=reason(problem))
            return True


def _out_of_time(limit_s: float) -> Solved:
    """Of a search that did not end by itself; under a larger limit it is tried again."""
    told = problem(
        "time-limit",
        f"the search was ended, for it went on {KILL_AFTER_S:g} s after its limit of {limit_s:g} s",
        hint=f"narrow the search with backend and pins, or raise {SOLVE_LIMIT}",
    )
    return Solved("succeeded", "time-limit", problem=told.model_dump_json(), cut_at_s=limit_s)


async def _persist(change: Callable[..., Awaitable[Answer]], *arguments: object, **values: object) -> Answer:
    """Make a change, when the database is away as soon as it is back: what was found is not thrown away."""
    pause = BEAT_S
    while True:
        try:
            return await change(*arguments, **values)
        except AWAY as problem:
            log.warning("database does not answer", error=reason(problem), again_in_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
