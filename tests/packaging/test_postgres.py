"""The tests' PostgreSQL server: databases are separate, strangers are refused, no process outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed (extra api)")

ROOT = Path(__file__).resolve().parents[2]


def plain(url: str) -> str:
    """An address as libpq reads it."""
    return url.replace("+psycopg", "")


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended and waits to be collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def second_url(postgres_server: postgres.Server) -> str:
    """Another database of the same server, for the same test."""
    return postgres_server.url(postgres_server.create())


def test_databases_are_separate(postgres_url: str, second_url: str) -> None:
    """What one test writes the next does not see."""
    with psycopg.connect(plain(postgres_url)) as first, psycopg.connect(plain(second_url)) as second:
        first.execute("CREATE TABLE plans (id text)")
        first.commit()
        assert second.execute("SELECT to_regclass('plans')").fetchone() == (None,)


def test_open_connections_do_not_keep_a_database(postgres_server: postgres.Server) -> None:
    """A test that forgets to close does not fail the one after it."""
    name = postgres_server.create()
    with psycopg.connect(postgres_server.url(name, driver="")) as connection:
        connection.execute("SELECT 1")
        postgres_server.drop(name)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()


def test_strangers_are_refused(postgres_url: str, postgres_server: postgres.Server) -> None:
    """The password counts, as on a real server."""
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(plain(postgres_url).replace(postgres_server.password, "guessed"))


def test_stop_leaves_nothing(postgres_server: postgres.Server) -> None:
    """After `stop` neither processes nor files are there, though a client is still connected."""
    other = postgres.start()
    connection = psycopg.connect(other.url("postgres", driver=""))
    other.stop()
    connection.close()
    assert not alive(other.process.pid)
    assert not other.folder.exists()
    assert alive(postgres_server.process.pid)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent died")
def test_server_ends_with_a_killed_run(postgres_server: postgres.Server, tmp_path: Path) -> None:
    """A run that is killed cannot clean up; its server stops all the same."""
    code = (
        "from tests import postgres; import time; server = postgres.start(); "
        "print(server.process.pid, server.folder, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        run.send_signal(signal.SIGKILL)
    try:
        deadline = time.monotonic() + 120
        while alive(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(int(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["rm", "-rf", folder], check=True)


def test_missing_binaries_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PostgreSQL is not installed the tests say what to install."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(postgres.UnavailableError, match="apt-get install postgresql"):
        postgres.binaries()
