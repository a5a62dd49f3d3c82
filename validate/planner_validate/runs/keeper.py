"""Runs one program and sees to it that nothing of it outlives this process or the one that started it.

Needs the standard library only and runs as a script, between ``planner`` and the launcher of a run.  Launchers put
their workers into sessions of their own, where no signal to a group reaches them; so every process of the run carries
a mark in its environment, and what carries it is ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "PLANNER_VALIDATE_RUN"
"""Environment variable that all processes of a run share; its value is the run's own."""
FOLDER = "PLANNER_VALIDATE_FOLDER"
"""Environment variable with the private folder of the run, which is removed where the starter no longer can."""
GRACE_S = 3.0
"""Between the request to end and the kill."""
_PROC = Path("/proc")
_POLL_S = 0.1
_KILLS = 20
"""Rounds of killing: a process may start another one between two of them."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Marked:
    """A process of a run."""

    pid: int
    state: str
    """One letter of /proc/PID/stat: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    environment: dict[str, str]

    @property
    def rank(self) -> int | None:
        """Its RANK; only workers have one."""
        text = self.environment.get("RANK", "")
        return int(text) if text.isdecimal() else None


def marked(mark: str) -> Iterator[Marked]:
    """Living processes that carry the mark, this one left out; none where there is no /proc."""
    for folder in _PROC.glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            environment = _environment(folder)
            if environment.get(MARK) == mark:
                # The name in parentheses may itself hold spaces and parentheses.
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    yield Marked(int(folder.name), state, environment)


def _environment(folder: Path) -> dict[str, str]:
    entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, separator, value in (entry.partition("=") for entry in entries) if separator}


def end_all(mark: str, grace_s: float = GRACE_S) -> bool:
    """End every process that carries the mark: asked first, killed after ``grace_s``; whether none is left."""
    if not _signal(mark, signal.SIGTERM):
        return True
    # A stopped process takes the request when it is continued.
    _signal(mark, signal.SIGCONT)
    if _gone(mark, grace_s):
        return True
    return any(not _signal(mark, signal.SIGKILL) or _gone(mark, 0.5) for _ in range(_KILLS))


def _signal(mark: str, number: signal.Signals) -> int:
    """Processes that were signalled."""
    sent = 0
    for process in marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
            sent += 1
    return sent


def _gone(mark: str, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while True:
        reap()
        if next(marked(mark), None) is None:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def reap() -> None:
    """Take the exit codes of orphans that came to this process, so that they do not stay behind as zombies."""
    if not _adopts:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


_adopts = False
"""Whether orphans of the run come to this process; only then are all its children the run's."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for ``number`` when the parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _adopt_orphans() -> None:
    global _adopts
    with contextlib.suppress(OSError, AttributeError):
        _adopts = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def keep(command: list[str], mark: str) -> int:
    """Run the command until it ends, the standard input closes (the starter is gone) or a signal comes; then end all
    that is left of it.  The command's exit code (128 + number after a signal), or 128 + 15 where it was ended."""
    _adopt_orphans()
    starter = os.getppid()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Noted only: an exception out of a handler could come in the middle of the clean-up.
        signal.signal(number, lambda signalled, _: asked.append(signalled))
    child = subprocess.Popen(  # noqa: S603 - the command of our own caller
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    code = child.poll()
    while code is None and not asked and not _closed():
        code = child.poll()
    end_all(mark)
    if os.getppid() != starter and FOLDER in os.environ:
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    if code is None:
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


def _closed() -> bool:
    """Whether the starter has closed its end of the standard input; waits a moment for it."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], _POLL_S)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:], os.environ[MARK]))
