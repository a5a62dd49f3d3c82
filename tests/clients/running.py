"""The real service in a process of its own, for tests of clients: a free port, an empty database, gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 90


@contextmanager
def running_service(folder: Path, **settings: str) -> Iterator[str]:
    """Address of ``planner serve`` with a database in ``folder``; ``settings`` are PLANNER_ variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PLANNER_")},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PLANNER_DATABASE_URL": f"sqlite:///{folder}/plans.db",
        "PLANNER_PORT": str(port),
        **settings,
    }
    log = folder / "service.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "planner", "serve"], env=variables, stdout=stream, stderr=stream, cwd=folder
        )
    try:
        _until_ready(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    ends = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text(encoding="utf-8")[-4000:]
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"{url}/readyz", timeout=5
            ) as answer:
                if json.load(answer)["ready"]:
                    return
        except (urllib.error.URLError, OSError):
            pass
        assert time.monotonic() < ends, log.read_text(encoding="utf-8")[-4000:]
        time.sleep(0.1)
