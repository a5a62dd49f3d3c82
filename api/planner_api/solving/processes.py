"""One process that takes one function call at a time: how it is started, limited, listened to and ended.

No two processes share a lock or a pipe, so whatever happens to one, and whenever, leaves the others alone."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any

POLITENESS = 10
"""Of the processes against the one that answers requests (nice)."""
_END_S = 10.0
"""Longest wait for a process that was killed."""

_context = multiprocessing.get_context("forkserver")
# Forked from a helper that has the search loaded, so that one that was killed is replaced at once.
_context.set_forkserver_preload(["planner_api.solving.tasks"])
_book = threading.Lock()
"""multiprocessing keeps its list of children, and makes its folder for temporary files, without a lock."""


class _Telling:
    """Where functions tell how far they are; outside of a process of this module nobody hears."""

    listener: Connection | None = None

    def __call__(self, text: str) -> None:
        if self.listener is not None:
            self.listener.send(("told", text))


telling = _Telling()


class CrashError(Exception):
    """The process ended before it answered."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        """Negative: minus the number of the signal; None where it is not known."""


class RemoteError(Exception):
    """What the function raised, as text."""

    def __init__(self, name: str, text: str, trace: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.trace = name, trace


class Process:
    """Starts with its construction, which takes as long as it takes to fork."""

    def __init__(self, memory_bytes: int) -> None:
        self.calls = 0
        self._here, there = _context.Pipe()
        with _book:
            arguments = (there, memory_bytes, util.get_temp_dir())
            self._process = _context.Process(target=_serve, args=arguments, daemon=True)
            self._process.start()
        there.close()

    @property
    def usable(self) -> bool:
        with _book:
            return self._process.is_alive()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def call(self, function: Callable[..., Any], arguments: tuple[object, ...], hear: Callable[[str], None]) -> Any:
        """The function's result; ``hear`` gets what it tells meanwhile.

        Raises CrashError, MemoryError and RemoteError."""
        self.calls += 1
        try:
            self._here.send((function, arguments))
            while True:
                kind, content = self._here.recv()
                if kind == "told":
                    hear(content)
                elif kind == "result":
                    return content
                elif kind == "memory":
                    raise MemoryError
                else:
                    raise RemoteError(*content)
        except (EOFError, OSError):
            raise CrashError(self._ended()) from None

    def kill(self) -> None:
        """End it now, from any thread; a call in progress raises CrashError."""
        with _book:
            if self._process.is_alive():
                self._process.kill()

    def close(self) -> None:
        """End it and forget it."""
        self.kill()
        self._ended()
        self._here.close()

    def _ended(self) -> int | None:
        wait([self._process.sentinel], _END_S)
        with _book:
            code = self._process.exitcode
        # What multiprocessing says where the helper that would know the code is gone.
        return None if code == 255 else code


def _serve(there: Connection, memory_bytes: int, folder: str) -> None:
    """In the process: give way to the service, stay within memory, answer calls, end with the service."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the service, which gives searches their grace
    os.nice(POLITENESS)
    # The size of data, not of the address space: libraries reserve much that they never use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = threading.Thread(target=_end_with_parent, args=(folder,), daemon=True)
    parent.start()
    telling.listener = there
    while True:
        try:
            function, arguments = there.recv()
        except (EOFError, OSError):
            parent.join()  # only a parent that is gone leaves the pipe
            return
        there.send(_answer(function, arguments))


def _answer(function: Callable[..., Any], arguments: tuple[object, ...]) -> tuple[str, Any]:
    try:
        return "result", function(*arguments)
    except MemoryError:
        return "memory", None
    except Exception as error:
        return "error", (type(error).__name__, f"{error}"[:2000], traceback.format_exc()[-8000:])


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # With the socket of the helper that forks: a parent that was killed could not remove it.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
