"""A private PostgreSQL server for tests: which server may a test use, and which empty database is its own?

Each process of a test run starts its own server when the first of its tests asks, from the binaries of the system
(Debian: `postgresql`), and stops it at the end; a run that is killed takes its servers with it.
"""

from __future__ import annotations

import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

USER = "planner"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
# Nothing here survives a crash, so nothing waits for a disk; autovacuum would only take turns from the tests.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "shared_buffers": "32MB",
    "listen_addresses": "127.0.0.1",
}


class UnavailableError(Exception):
    """PostgreSQL cannot be started here, with the reason."""


def binaries() -> Path:
    """The folder with `initdb` and `postgres`: the newest of Debian's, else the one on the path.

    Raises ``UnavailableError`` where there is none.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("initdb")
    candidates = [*reversed(found), *([Path(on_path).resolve()] if on_path else [])]
    for initdb in candidates:
        if (initdb.parent / "postgres").is_file():
            return initdb.parent
    raise UnavailableError("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")


def account() -> pwd.struct_passwd | None:
    """Whom the server runs as: None means ourselves; as root, which it refuses, a user without rights.

    Raises ``UnavailableError`` where root cannot become another user.
    """
    if os.geteuid() != 0:
        return None
    if shutil.which("setpriv") is None:
        raise UnavailableError("PostgreSQL refuses to run as root, and setpriv (util-linux) is not installed")
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise UnavailableError("PostgreSQL refuses to run as root, and there is neither a user postgres nor a user nobody")


@dataclass
class Server:
    """A running server: its folder, port, superuser's password and process."""

    folder: Path
    port: int
    password: str
    process: subprocess.Popen[bytes]
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def url(self, database: str, *, driver: str = "+psycopg") -> str:
        """The address of a database for SQLAlchemy; with an empty ``driver``, for libpq."""
        return f"postgresql{driver}://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def create(self) -> str:
        """A new, empty database; its name."""
        name = f"test_{next(self.numbers)}"
        self._administer(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return name

    def drop(self, name: str) -> None:
        """Removes a database; connections that a test left open are cut."""
        self._administer(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def stop(self) -> None:
        """Ends the server, whoever is connected, and removes its files."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _administer(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url("postgres", driver=""), autocommit=True) as connection:
            connection.execute(statement.encode())


def start() -> Server:
    """A new server on a free port of the loopback and on a socket in its folder.

    Raises ``UnavailableError`` where PostgreSQL is not installed, ``RuntimeError`` with the server's own words where
    it does not start.
    """
    folder_of_binaries, user = binaries(), account()
    # Not pytest's folder: that is closed to other users, and a socket's path may have 107 characters only.
    folder = Path(tempfile.mkdtemp(prefix="planner-pg-", dir="/tmp"))
    try:
        password = secrets.token_hex(16)
        (folder / "password").write_text(password, encoding="utf-8")
        if user is not None:
            for path in (folder, folder / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
        _initialise(folder, folder_of_binaries, user)
        for _ in range(5):
            port = _free_port()
            process = _launch(folder, port, folder_of_binaries, user)
            if _answers(process, folder, port):
                return Server(folder, port, password, process)
        raise RuntimeError(
            "PostgreSQL did not start: " + (folder / "log").read_text(encoding="utf-8", errors="replace")
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _as_user(user: pwd.struct_passwd | None) -> list[str]:
    """What stands before a command: the change of user, and the order to stop the server when we die."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    changed = [] if user is None else [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return [setpriv, *changed, "--pdeathsig=INT", "--"]


def _environment() -> dict[str, str]:
    """Ours without the variables by which PostgreSQL's programs find a server, and without words of a language."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _initialise(folder: Path, folder_of_binaries: Path, user: pwd.struct_passwd | None) -> None:
    options = ["--no-sync", "--no-locale", "--encoding=UTF8", f"--username={USER}", f"--pwfile={folder / 'password'}"]
    done = subprocess.run(
        [
            *_as_user(user),
            str(folder_of_binaries / "initdb"),
            "-D",
            str(folder / "data"),
            "-A",
            "scram-sha-256",
            *options,
        ],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed: {done.stdout}{done.stderr}")


def _launch(
    folder: Path, port: int, folder_of_binaries: Path, user: pwd.struct_passwd | None
) -> subprocess.Popen[bytes]:
    settings = SETTINGS | {"port": str(port), "unix_socket_directories": str(folder)}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*_as_user(user), str(folder_of_binaries / "postgres"), "-D", str(folder / "data"), *options],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests; they stop the server
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], folder: Path, port: int) -> bool:
    """Whether the server gets ready; False when it ended, for instance because another took the port."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None:
        # The last line of its lock file tells: it is ours, whoever else listens on that port.
        lock = folder / "data" / "postmaster.pid"
        if lock.is_file() and lock.read_text(encoding="utf-8").rstrip().endswith("ready"):
            return True
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError(f"PostgreSQL was not ready on port {port} after {START_TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """The server of this process of the test run; tests that ask for it skip with the reason where there is none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (extra api)")
    try:
        server = start()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """The address (`postgresql+psycopg://...`) of an empty database that is this test's alone."""
    name = postgres_server.create()
    yield postgres_server.url(name)
    postgres_server.drop(name)
