"""Limits of time and memory hold, for the pool of processes and for the service as a whole."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from planner_api.problems import ProblemError
from planner_api.solving.pool import LostError, Pool
from planner_api.solving.processes import telling
from tests.service.processes import Place, busiest, children, lives, long_question, quick_question, until

MEMORY_BYTES = 1024**3
LONG_S = 120.0


@asynccontextmanager
async def pool(processes: int = 1) -> AsyncIterator[Pool]:
    """A pool of its own; nothing of it is left."""
    made = Pool(processes, MEMORY_BYTES, "PLANNER_QUICK_TIME_LIMIT_S")
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        assert not made.alive


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The test; processes that were started for it have ended, but for multiprocessing's helpers."""
    before = children(os.getpid())
    asyncio.run(test())
    until(lambda: len(children(os.getpid()) - before) <= 2, "processes are left")


def _tell_three() -> int:
    for number in range(3):
        telling(str(number))
    return 3


def _raise() -> None:
    raise ValueError("some words")


def test_memory() -> None:
    """More than it may take is refused; the next call is served."""

    async def test() -> None:
        async with pool() as made:
            assert len(await made.run(bytes, MEMORY_BYTES // 8, limit_s=LONG_S)) == MEMORY_BYTES // 8
            with pytest.raises(ProblemError) as caught:
                await made.run(bytes, 2 * MEMORY_BYTES, limit_s=LONG_S)
            assert caught.value.problem.type == "urn:planner:problem:out-of-memory"
            assert await made.run(math.factorial, 5, limit_s=LONG_S) == 120

    run(test)


def test_library_that_cannot_get_memory() -> None:
    """Libraries in C abort: that is no crash of the search."""

    async def test() -> None:
        async with pool() as made:
            with pytest.raises(ProblemError) as caught:
                await made.run(os.abort, limit_s=LONG_S)
            assert caught.value.problem.type == "urn:planner:problem:out-of-memory"
            assert not isinstance(caught.value, LostError)

    run(test)


def test_time() -> None:
    """What takes too long is ended, with its process."""

    async def test() -> None:
        async with pool() as made:
            first = await made.run(os.getpid, limit_s=LONG_S)
            with pytest.raises(ProblemError) as caught:
                await made.run(time.sleep, LONG_S, limit_s=0.3)
            assert caught.value.problem.type == "urn:planner:problem:took-too-long"
            assert "0.3 s" in caught.value.problem.detail
            assert "PLANNER_QUICK_TIME_LIMIT_S" in str(caught.value.problem.hint)
            assert await made.run(os.getpid, limit_s=LONG_S) != first
            until(lambda: not lives(first), "its process lives")

    run(test)


@pytest.mark.parametrize(("how", "told"), [(signal.SIGKILL, "signal 9"), (signal.SIGSEGV, "signal 11")])
def test_killed(how: int, told: str) -> None:
    """A process that is ended from outside is told apart, and replaced."""

    async def test() -> None:
        async with pool() as made:
            pid = await made.run(os.getpid, limit_s=LONG_S)
            work = asyncio.ensure_future(made.run(time.sleep, LONG_S, limit_s=LONG_S))
            await asyncio.sleep(0.1)
            os.kill(pid, how)
            with pytest.raises(LostError, match=told):
                await work
            assert await made.run(math.factorial, 5, limit_s=LONG_S) == 120

    run(test)


def test_cancelled_call_ends_its_process_and_no_other() -> None:
    """The process of a caller who leaves is free at once; calls beside it go on."""

    async def test() -> None:
        async with pool(2) as made:
            beside = asyncio.ensure_future(made.run(time.sleep, 1.0, limit_s=LONG_S))
            leaves = asyncio.ensure_future(made.run(time.sleep, LONG_S, limit_s=LONG_S))
            waits = asyncio.ensure_future(made.run(math.factorial, 5, limit_s=LONG_S))
            await asyncio.sleep(0.1)
            leaves.cancel()
            assert await waits == 120
            await beside
            with pytest.raises(asyncio.CancelledError):
                await leaves

    run(test)


def test_many_calls_with_kills_at_any_time() -> None:
    """Whatever is killed, every call ends, and its answer is its own."""

    others = children(os.getpid())

    async def test() -> None:
        async with pool(2) as made:

            async def call(number: int) -> str:
                try:
                    found = await made.run(math.factorial, 3000 + number, limit_s=LONG_S)
                    return "right" if found == math.factorial(3000 + number) else "wrong"
                except LostError:
                    return "lost"

            calls = [asyncio.ensure_future(call(number)) for number in range(300)]
            while not all(one.done() for one in calls):
                await asyncio.sleep(0.02)
                # Not the helper that forks them, which is a child of this process.
                pids = {pid for child in children(os.getpid()) for pid in children(child)} - others
                for pid in sorted(pids)[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            ended = [one.result() for one in calls]
            assert set(ended) <= {"right", "lost"}
            assert "right" in ended

    run(test)


def test_tells_and_raises() -> None:
    """What a function tells arrives in order; what it raises is a failure of the solver, and its process stays."""

    async def test() -> None:
        heard: list[str] = []
        async with pool() as made:
            pid = await made.run(os.getpid, limit_s=LONG_S)
            assert await made.run(_tell_three, limit_s=LONG_S, hear=heard.append) == 3
            assert heard == ["0", "1", "2"]
            with pytest.raises(ProblemError, match="ValueError") as caught:
                await made.run(_raise, limit_s=LONG_S)
            assert "some words" not in caught.value.problem.model_dump_json()
            assert await made.run(os.getpid, limit_s=LONG_S) == pid

    run(test)


def test_stopped_pool_refuses() -> None:
    async def test() -> None:
        async with pool() as made:
            work = asyncio.ensure_future(made.run(time.sleep, LONG_S, limit_s=LONG_S))
            waits = asyncio.ensure_future(made.run(time.sleep, LONG_S, limit_s=LONG_S))
            await asyncio.sleep(0.1)
            await made.stop()
            with pytest.raises(ProblemError):
                await work
            with pytest.raises(ProblemError, match="ending"):
                await waits

    run(test)


def test_search_ends_at_its_limit(sqlite: Place) -> None:
    """A search without time ends by itself, with the best that it has found until then; that stays the answer until
    there is more time."""
    question = long_question()
    short = sqlite.serve(solve_time_limit_s=0.01)
    plans = [short.ask(question, wait_s=60).json() for _ in range(2)]
    assert {(plan["state"], plan["attempts"], plan["outcome"]) for plan in plans} == {("succeeded", 1, "plan")}
    assert {plan["result"]["search"]["status"] for plan in plans} == {"feasible"}
    assert len(short.events("plan started")) == 1
    assert short.end() == 0
    service = sqlite.serve()
    longer = [service.ask(question, wait_s=60).json() for _ in range(2)]
    assert {plan["result"]["search"]["status"] for plan in longer} == {"optimal"}
    assert {plan["id"] for plan in (*plans, *longer)} == {plans[0]["id"]}
    assert len(service.events("plan started")) == 1


def test_search_is_ended_when_it_does_not_end_itself(sqlite: Place) -> None:
    """A solver that hangs is ended some time after its limit: the plan is out of time, and the next one is made."""
    service = sqlite.serve(solve_time_limit_s=1)
    plan = service.ask(long_question()).json()["id"]
    until(lambda: service.plan(plan)["state"] == "running", "it does not begin")
    hanging = busiest(service.children())
    os.kill(hanging, signal.SIGSTOP)
    ended = service.ended(plan)
    if ended["outcome"] != "plan":  # else it had ended before it was stopped, and an idle process sleeps
        assert (ended["state"], ended["outcome"]) == ("succeeded", "time-limit")
        assert "PLANNER_SOLVE_TIME_LIMIT_S" in ended["problem"]["hint"]
        until(lambda: not lives(hanging), "it hangs on")
    assert service.ask(quick_question(0), wait_s=60).json()["outcome"] == "plan"


def test_large_searches_fit_in_the_least_memory(sqlite: Place) -> None:
    """The limit may be set as low as the settings allow, for the largest clusters of the examples."""
    service = sqlite.serve(solve_memory_bytes=512 * 1024**2)
    for question in (long_question(), {"model": "405b", "cluster": {"gpu": "h100-sxm", "gpus": 16384}}):
        plan = service.ask(question, wait_s=60).json()
        assert plan["outcome"] == "plan", plan["problem"]
    assert service.ask(quick_question(0), wait_s=60).json()["outcome"] == "plan"
