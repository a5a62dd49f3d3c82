"""Work in processes of its own, with limits on time and memory: whatever happens there, the service answers on."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from planner_api.problems import ProblemError
from planner_api.solving.processes import CrashError, Process, RemoteError

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

CALLS_OF_A_PROCESS = 200
"""After so many a process is replaced, so that memory which libraries keep is given back."""


class LostError(ProblemError):
    """The process was ended by somebody else: the call itself may be fine."""


def _nobody(_: str) -> None:
    return None


class Pool:
    """Some processes that take one function call each at a time."""

    def __init__(self, processes: int, memory_bytes: int, limit_name: str) -> None:
        """``limit_name`` is the setting that limits the time of its calls."""
        self._processes, self._memory_bytes, self._limit_name = processes, memory_bytes, limit_name
        # A thread for each waits for its answer; the event loop never does.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="pool")
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Process] = []
        self._calls: set[_Call] = set()
        self._stopped = False

    async def start(self) -> None:
        """Start all processes, so that the first calls do not wait for them."""
        loop = asyncio.get_running_loop()
        made = [loop.run_in_executor(self._threads, Process, self._memory_bytes) for _ in range(self._processes)]
        self._idle += await asyncio.gather(*made)

    async def run(
        self,
        function: Callable[..., Result],
        *arguments: object,
        limit_s: float,
        hear: Callable[[str], None] = _nobody,
    ) -> Result:
        """The function's result; ends its process when the caller is cancelled.

        ``limit_s`` counts from when a process takes it up; ``hear`` is called, from another thread, with what the
        function tells.  Raises ProblemError where it took too long or too much memory, LostError where its process was
        ended by somebody else."""
        async with self._free:
            if self._stopped:
                raise ProblemError(
                    "shutting-down",
                    "the service is ending",
                    hint="ask again a little later",
                    headers={"Retry-After": "10"},
                )
            call = _Call(function, arguments, hear)
            self._calls.add(call)
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._work, call)
            try:
                async with asyncio.timeout(limit_s):
                    return await asyncio.shield(work)
            except TimeoutError:
                raise ProblemError(
                    "took-too-long",
                    f"the work was ended after {limit_s:g} s",
                    hint=f"ask for less; the limit is the service's {self._limit_name}, which its operator can raise",
                ) from None
            finally:
                # Also of a caller who was cancelled.  The thread is free a moment later.
                call.end()
                self._calls.discard(call)
                work.add_done_callback(_noted)

    def _work(self, call: _Call) -> Any:
        """In a thread."""
        process = self._take()
        try:
            answer = call.on(process)
        except MemoryError:
            process.close()
            raise _out_of_memory() from None
        except RemoteError as error:
            log.error("function failed", error=str(error), trace=error.trace)
            self._give(process)
            raise ProblemError("solver-failed", f"the work raised {error.name}", hint="report this fault") from None
        except CrashError as end:
            process.close()
            raise _of_crash(end.exit_code) from None
        except BaseException:
            process.close()
            raise
        self._give(process)
        return answer

    def _take(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.usable:
                return process
            process.close()  # somebody killed it while it had nothing to do
        return Process(self._memory_bytes)

    def _give(self, process: Process) -> None:
        if self._stopped or process.calls >= CALLS_OF_A_PROCESS:
            process.close()
        else:
            self._idle.append(process)

    @property
    def alive(self) -> bool:
        """Whether calls are taken; processes that were killed are replaced when they are needed."""
        return not self._stopped

    async def stop(self) -> None:
        """End all processes and what they work on."""
        self._stopped = True
        for call in tuple(self._calls):
            call.end()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        while self._idle:
            await asyncio.to_thread(self._idle.pop().close)


class _Call:
    """A call in a process, and how to end it from the outside."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[object, ...], hear: Callable[[str], None]
    ) -> None:
        self._function, self._arguments, self._hear = function, arguments, hear
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._ended = False

    def on(self, process: Process) -> Any:
        with self._lock:
            if self._ended:
                raise CrashError(None)
            self._process = process
        try:
            return process.call(self._function, self._arguments, self._hear)
        finally:
            # From here on the process may belong to another call.
            with self._lock:
                self._process = None

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()


def _noted(work: asyncio.Future[Any]) -> None:
    """Nobody may be left to hear of what an ended call raised."""
    if not work.cancelled():
        work.exception()


def _out_of_memory() -> ProblemError:
    return ProblemError(
        "out-of-memory", "the work took more memory than it may", hint="narrow the question: pins, backend, fewer GPUs"
    )


def _of_crash(exit_code: int | None) -> ProblemError:
    # Libraries that cannot get memory end the process.
    if exit_code == -signal.SIGABRT:
        return _out_of_memory()
    if exit_code is None:
        how = "was lost"
    elif exit_code < 0:
        how = f"was ended by signal {-exit_code}"
    else:
        how = f"ended with code {exit_code}"
    return LostError(
        "solver-failed",
        f"the process {how}",
        hint="the machine may be short of memory; ask again, or narrow the question",
    )
