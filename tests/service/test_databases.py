"""A database that is not there, goes away, or has no room: clear words, no crash, and the work goes on afterwards."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.processes import Place, Running, free_port, long_question, quick_question, until


def _healthy(service: Running) -> bool:
    with service.client() as client:
        return client.get("/healthz").status_code == 200


def _ready(service: Running) -> bool:
    with service.client() as client:
        return client.get("/readyz").status_code == 200


@contextmanager
def _away(place: Place) -> Iterator[None]:
    """Nobody is connected to the database, and nobody gets in."""
    import psycopg

    server, _, name = place.url.rpartition("/")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as database:
        database.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
        try:
            database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            yield
        finally:
            database.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_no_server(sqlite: Place, command: str) -> None:
    """Nothing listens where the database should be; the password is not told."""
    sqlite.url = f"postgresql://planner:secret-word@127.0.0.1:{free_port()}/planner"
    refused = sqlite.refused(command)
    assert refused.returncode == 2
    assert "the database cannot be used" in refused.stderr
    assert "PLANNER_DATABASE_URL" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "secret-word" not in refused.stderr


@pytest.mark.parametrize("kind", ["folder", "no database", "below a file"])
def test_unusable_file(sqlite: Place, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "planner.db"
    if kind == "folder":
        path.mkdir()
    elif kind == "no database":
        path.write_text("some notes of mine\n" * 100)
    else:
        path.write_text("")
        sqlite.url += "/planner.db"
    refused = sqlite.refused("serve")
    assert refused.returncode == 2, refused.stderr
    assert "the database cannot be used" in refused.stderr
    assert "Traceback" not in refused.stderr
    if kind == "no database":
        assert path.read_text() == "some notes of mine\n" * 100


def test_database_goes_away_and_comes_back(postgres: Place) -> None:
    """Requests are told, health is answered, a search goes on, and its result is recorded when there is a place."""
    service = postgres.serve(lost_after_s=60)
    known = service.ask(quick_question(0), wait_s=60).json()
    running = service.ask(long_question()).json()["id"]
    service.in_state(running, "running")
    with _away(postgres):
        until(lambda: not _ready(service), "it says that it is ready")
        assert _healthy(service)
        told = service.ask(quick_question(1))
        assert (told.status_code, told.json()["type"]) == (503, "urn:planner:problem:not-able")
        assert "database" in told.json()["detail"]
        assert int(told.headers["Retry-After"]) > 0
        # What is remembered needs no database.
        assert service.ask(quick_question(0)).json()["result"] == known["result"]
        until(lambda: service.events("database does not answer"), "nobody notices")
    until(lambda: _ready(service), "it does not recover")
    ended = service.ended(running)
    assert (ended["state"], ended["attempts"]) == ("succeeded", 1)
    assert service.ask(quick_question(1), wait_s=60).json()["state"] == "succeeded"
    assert service.end() == 0


def test_ends_though_the_database_is_away(postgres: Place) -> None:
    """SIGTERM is obeyed; the plan is made by the next one."""
    service = postgres.serve(shutdown_grace_s=0)
    plan = service.ask(long_question()).json()["id"]
    service.in_state(plan, "running")
    with _away(postgres):
        assert service.end() == 0
    assert service.start().ended(plan)["state"] == "succeeded"


def test_disk_is_full(sqlite: Place) -> None:
    """No room for another page: requests are told, known plans are answered, and with room the work goes on."""
    service = sqlite.serve()
    known = service.ask(quick_question(0), wait_s=60).json()
    running = service.ask(long_question()).json()["id"]
    service.in_state(running, "running")
    # The next write does not fit; neither does a log that is longer.
    room = min(Path(sqlite.url.removeprefix("sqlite:///") + end).stat().st_size for end in ("", "-wal"))
    before = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (room, before[1]))
    told = until(lambda: answer if (answer := service.ask(quick_question(1))).status_code >= 500 else None, "it writes")
    assert told is not None
    assert (told.status_code, told.json()["type"]) == (503, "urn:planner:problem:not-able")
    assert "disk may be full" in told.json()["detail"]
    assert _healthy(service)
    assert service.ask(quick_question(0)).json()["result"] == known["result"]
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, before)
    assert service.ended(running)["state"] == "succeeded"
    assert service.ask(quick_question(1), wait_s=60).json()["state"] == "succeeded"
    assert service.end() == 0
