"""Work in processes of its own, with limits on time and memory: whatever happens there, the service answers on.

Processes are forked from a helper that has the search loaded, so that one that was killed is replaced at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from planner_api.problems import ProblemError

Result = TypeVar("Result")

POLITENESS = 10
"""Of the processes against the one that answers requests (nice)."""
TASKS_OF_A_PROCESS = 200
"""After so many a process is replaced, so that memory which libraries keep is given back."""


class Pool:
    """Some processes that take one function call each at a time."""

    def __init__(self, processes: int, memory_bytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["planner_api.solving.tasks"])
        self._pool = ProcessPool(
            max_workers=processes,
            max_tasks=TASKS_OF_A_PROCESS,
            initializer=_prepare,
            initargs=(memory_bytes,),
            context=context,
        )

    async def start(self) -> None:
        """Start the processes, which blocks for as long as the search takes to load, before anybody waits for them."""
        await asyncio.to_thread(lambda: self._pool.schedule(os.getpid).result())

    async def run(self, function: Callable[..., Result], *arguments: object, limit_s: float) -> Result:
        """The function's result; ends its process when the caller is cancelled.

        ``limit_s`` counts from when a process takes it up.  Raises ProblemError where it took too long, too much memory
        or its process died."""
        future = asyncio.wrap_future(self._pool.schedule(function, args=arguments, timeout=limit_s))
        try:
            return await future
        except (FutureTimeoutError, TimeoutError):
            raise ProblemError(
                "took-too-long", f"the work was ended after {limit_s:g} s", hint="ask for less, or raise the limit"
            ) from None
        except MemoryError:
            raise _out_of_memory() from None
        except ProcessExpired as end:
            # Libraries that cannot get memory end the process.
            if end.exitcode in (-6, 134):
                raise _out_of_memory() from None
            raise ProblemError(
                "solver-failed",
                f"the process ended with code {end.exitcode}",
                hint="try again, and report it if it stays",
            ) from None
        except (BrokenProcessPool, RuntimeError) as problem:
            raise ProblemError("shutting-down", str(problem) or "the service is ending") from None

    @property
    def alive(self) -> bool:
        return bool(self._pool.active)

    def stop(self) -> None:
        """End all processes."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join(timeout=10)


def _out_of_memory() -> ProblemError:
    return ProblemError(
        "out-of-memory", "the work took more memory than it may", hint="narrow the question: pins, backend, fewer GPUs"
    )


def _prepare(memory_bytes: int) -> None:
    """In a new process: give way to the service, stay within memory, and end with the service."""
    os.nice(POLITENESS)
    # The size of data, not of the address space: libraries reserve much that they never use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
