"""The service in processes of its own: started, asked, killed, and what is left of it afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0
"""After so long a test gives up waiting; nothing is asserted about how long anything takes."""

Answer = TypeVar("Answer")


def until(what: Callable[[], Answer], why: str) -> Answer:
    """The first answer that is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.02)
    return answer


def quick_question(number: int) -> dict[str, Any]:
    """A question of its own for each number, answered in a moment."""
    return {
        "model": "8b",
        "cluster": {"gpu": "h100-sxm", "gpus": 8},
        "job": {"seq_len": 4096, "global_batch": 8 + 8 * number},
        "backend": "megatron",
    }


def long_question(number: int = 0) -> dict[str, Any]:
    """A question that takes seconds."""
    return {
        "model": "deepseek-v3",
        "cluster": {"gpu": "h100-sxm", "gpus": 2048},
        "job": {"seq_len": 4096, "global_batch": 8192 + 2048 * number},
    }


def children(pid: int) -> set[int]:
    """All processes that descend from one, itself excluded."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if state[0] != "Z":
                found[int(entry.name)] = int(state[1])
    mine: set[int] = {pid}
    while more := {child for child, parent in found.items() if parent in mine} - mine:
        mine |= more
    return mine - {pid}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ticks(pid: int) -> int:
    """Processor time used so far, in hundredths of a second."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


def busiest(pids: set[int]) -> int:
    """The one that uses most processor time while we look."""
    before = {pid: ticks(pid) for pid in pids}
    time.sleep(0.5)
    return max(pids, key=lambda pid: ticks(pid) - before[pid])


@dataclass
class Running:
    """One process of the service, ``serve`` or ``worker``."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)
    port: int = 0

    def start(self) -> Running:
        said = len(self.log.read_text()) if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planner", *self.command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        told = "listening" if self.command[0] == "serve" else "started"
        until(lambda: self.events(told, said) or self.process.poll() is not None, "it did not start")
        assert self.process.poll() is None, self.log.read_text()
        if self.command[0] == "serve":
            self.port = int(str(self.events(told, said)[0]["url"]).rpartition(":")[2])
        return self

    def events(self, event: str, after: int = 0) -> list[dict[str, Any]]:
        """Lines of the log of one kind, from a place in it on."""
        found = []
        for text in self.log.read_text()[after:].splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and line.get("event") == event:
                found.append(line)
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, timeout_s: float = DEADLINE_S) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def ask(self, question: dict[str, Any], wait_s: int = 0) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/plans", json=question, headers={"Prefer": f"wait={wait_s}"})

    def listed(self) -> list[dict[str, Any]]:
        """The youngest plans."""
        with self.client() as client:
            plans: list[dict[str, Any]] = client.get("/v1/plans", params={"limit": 200}).json()["plans"]
        return plans

    def plan(self, plan: str) -> dict[str, Any]:
        with self.client() as client:
            answer = client.get(f"/v1/plans/{plan}")
        assert answer.status_code == 200, answer.text
        known: dict[str, Any] = answer.json()
        return known

    def ended(self, plan: str) -> dict[str, Any]:
        """The plan when it has ended."""
        finished = ("succeeded", "failed", "cancelled")
        return until(lambda: known if (known := self.plan(plan))["state"] in finished else None, f"{plan} does not end")  # type: ignore[return-value, arg-type]

    def in_state(self, plan: str, state: str) -> dict[str, Any]:
        return until(lambda: known if (known := self.plan(plan))["state"] == state else None, f"{plan} is not {state}")  # type: ignore[return-value, arg-type]

    def children(self) -> set[int]:
        return children(self.process.pid)

    def searching(self) -> bool:
        """Whether any of its processes uses much of a core."""
        pids = self.children()
        before = {pid: ticks(pid) for pid in pids}
        time.sleep(0.5)
        return any(ticks(pid) - before[pid] > 10 for pid in pids)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and nothing of it is left."""
        left = self.children()
        self.process.kill()
        self.process.wait()
        until(lambda: not any(lives(pid) for pid in left), "processes are left after a kill")

    def end(self) -> int:
        """SIGTERM; the exit code, with nothing left."""
        left = self.children()
        self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        until(lambda: not any(lives(pid) for pid in left), "processes are left after the end")
        return code


@dataclass
class Place:
    """A database and a folder, where services are started."""

    url: str
    folder: Path
    made: list[Running] = field(default_factory=list)
    # Short: the path of a socket may have 107 characters.
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="planner-service-", dir="/tmp")))

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    @property
    def kind(self) -> str:
        return "SQLite" if self.is_sqlite else "PostgreSQL"

    def environment(self, **settings: object) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PLANNER_")}
        path = os.pathsep.join(str(ROOT / part) for part in (".", "api", "validate"))
        given = {"workers": 1, "port": 0, "rate_limit": "", "lost_after_s": 2, "quick_wait_s": 0, **settings}
        return {
            **ours,
            "PYTHONPATH": path,
            "TMPDIR": str(self.temporary),
            "PLANNER_DATABASE_URL": self.url,
            **{f"PLANNER_{name.upper()}": str(value) for name, value in given.items()},
        }

    def serve(self, **settings: object) -> Running:
        return self._start(["serve"], settings)

    def worker(self, **settings: object) -> Running:
        return self._start(["worker"], settings)

    def _start(self, command: list[str], settings: dict[str, object]) -> Running:
        log = self.folder / f"{len(self.made)}.log"
        running = Running(command, self.environment(**settings), log)
        self.made.append(running)
        return running.start()

    def refused(self, command: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """A service that should not start."""
        return subprocess.run(
            [sys.executable, "-m", "planner", command],
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def started(self) -> dict[str, int]:
        """How often each plan was taken up, by all logs together."""
        counts: dict[str, int] = {}
        for running in self.made:
            for line in running.events("plan started"):
                counts[line["plan"]] = counts.get(line["plan"], 0) + 1
        return counts

    def close(self) -> None:
        """End whatever still runs; the folder for temporary files is empty then."""
        for running in self.made:
            process = getattr(running, "process", None)
            if process is not None and process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                running.kill()
        until(lambda: not os.listdir(self.temporary), f"left behind in {self.temporary}")
        self.temporary.rmdir()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
