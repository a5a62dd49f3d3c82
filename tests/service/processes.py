"""Processes of the service that tests start, kill and start again, on one database."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 120.0
"""Longest wait for anything; a failure then says what was waited for."""


def until(what: str, check: Callable[[], bool]) -> None:
    """Wait until ``check`` holds."""
    ends = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(0.05)


class Member:
    """One process: ``planner serve`` or ``planner worker``."""

    def __init__(self, folder: Path, name: str, database: str, command: str = "serve", **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._command = command
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = folder / f"{name}.log"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PLANNER_")}
        given = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PLANNER_DATABASE_URL": database,
            "PLANNER_PORT": str(port),
            "PLANNER_RATE_LIMIT": "",
            "PLANNER_LOST_AFTER_S": "30",
            "PLANNER_SHUTDOWN_GRACE_S": "5",
            "TMPDIR": str(folder),
            **settings,
        }
        with self.log_file.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planner", command],
                env={**ours, **given},
                stdout=stream,
                stderr=stream,
                cwd=folder,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)
        until(f"{name} started", self._started)

    def _started(self) -> bool:
        assert self.process.poll() is None, self.log[-3000:]
        return '"started"' in self.log and ('"listening"' in self.log or self._command == "worker")

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == name]

    def ask(self, body: dict[str, Any], wait_s: int = 0) -> httpx.Response:
        return self.client.post("/v1/plans", json=body, headers={"Prefer": f"wait={wait_s}"})

    def kill(self) -> None:
        """SIGKILL to the process itself, not to those that it has started."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Told to end; its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=WAIT_S)
        self.client.close()
        return code

    def left(self) -> list[int]:
        """Processes of its session that live."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found


def questions(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Different questions, each answered in a second or so."""
    return [
        {
            "model": "llama-3.1-8b",
            "cluster": {"gpu": "h100", "gpus": 16},
            "job": {"global_batch": 64 * (offset + k + 1)},
        }
        for k in range(count)
    ]


def all_ended(member: Member, plans: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The plans when all of them have ended."""
    found: dict[str, dict[str, Any]] = {}

    def ended() -> bool:
        for plan in plans:
            if plan not in found:
                job = member.client.get(f"/v1/plans/{plan}").json()
                if job["state"] in ("succeeded", "failed", "cancelled"):
                    found[plan] = job
        return len(found) == len(set(plans))

    until("all plans ended", ended)
    return found
