"""What must not be possible: getting in without a token, reading the server's disk, running what a name says.

Nor filling its memory, holding its connections, or learning its secrets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from planner_api.guards.hosts import HostGuard
from planner_api.guards.tokens import REMEMBERED_S
from tests.api.conftest import Running
from tests.api.questions import SMALL, plan, problem_of
from tests.clients.running import running_service

SECRET = "a-secret-that-must-not-be-told"
HOSTILE = (
    "{{7*7}}",
    "${HOME}",
    "$(touch INJECTED)",
    "`touch INJECTED`",
    "a'; touch INJECTED; '",
    'a" && touch INJECTED "',
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that asks for tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    with running_service(folder, PLANNER_REQUIRE_TOKENS="true", PLANNER_RATE_LIMIT="") as url:
        yield Running(url, folder)


def token(service: Running, *arguments: str) -> dict[str, Any]:
    """A new token, made as an operator makes it while the service runs."""
    done = subprocess.run(
        [sys.executable, "-m", "planner", "tokens", "create", "test", *arguments, "--json"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PLANNER_DATABASE_URL": f"sqlite:///{service.folder}/plans.db",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def until_refused(api: httpx.Client, text: str) -> httpx.Response:
    """The last of many requests with a token: it is remembered for five seconds, and using it adds nothing to them."""
    ends = time.monotonic() + REMEMBERED_S + 0.5
    while (answer := api.get("/v1/plans", headers=bearer(text))).status_code == 200 and time.monotonic() < ends:
        time.sleep(0.05)
    return answer


def test_tokens(guarded: Running) -> None:
    """Without one, or with one that is unknown, too narrow, expired or revoked, nothing is answered."""
    with httpx.Client(base_url=guarded.url, timeout=60, trust_env=False) as api:
        told = problem_of(api.get("/v1/catalog/models"), 401)
        assert "planner tokens create" in told["hint"]
        assert api.get("/v1/catalog/models").headers["www-authenticate"].startswith("Bearer")
        for wrong in ("plnr_000000000000_x", "x", "plnr__", "plnr_" + "a" * 500, "'; DROP TABLE tokens; --"):
            problem_of(api.get("/v1/catalog/models", headers=bearer(wrong)), 401)
        reader, planner, admin = (token(guarded, "--scope", scope) for scope in ("read", "plan", "admin"))
        assert api.get("/v1/catalog/models", headers=bearer(reader["token"])).status_code == 200
        problem_of(api.post("/v1/plans", json=SMALL, headers=bearer(reader["token"])), 403)
        found = plan(api, SMALL, **bearer(planner["token"]))
        problem_of(api.delete(f"/v1/measurements/{'0' * 64}", headers=bearer(planner["token"])), 403)
        problem_of(api.delete(f"/v1/measurements/{'0' * 64}", headers=bearer(admin["token"])), 404)
        # No route but the probes, the description and the way to sign in is open.
        for path in ("/v1/plans", f"/v1/plans/{found['id']}/artifacts", "/metrics", "/v1/measurements"):
            problem_of(api.get(path), 401)
        assert api.get("/").status_code == 303
        assert api.get(f"/plans/{found['id']}").status_code == 303
        with sqlite3.connect(guarded.folder / "plans.db", timeout=30) as db:
            kept = json.dumps(db.execute("SELECT * FROM tokens").fetchall())
            assert all(made["token"].split("_", 2)[2] not in kept for made in (reader, planner, admin))
            db.execute("UPDATE tokens SET expires_at = 1 WHERE id = ?", (admin["id"],))
            db.execute("UPDATE tokens SET revoked_at = 1 WHERE id = ?", (planner["id"],))
        for made, why in ((admin, "expired"), (planner, "revoked")):
            refused = until_refused(api, made["token"])
            assert why in problem_of(refused, 401)["detail"]
    assert all(made["token"] not in guarded.log for made in (reader, planner, admin))


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "/etc/passwd",
        "..%5c..%5cx",
        "plan.json%00.sh",
        "%252e%252e%252fx",
    ],
)
def test_artifacts_stay_in_their_folder(api: httpx.Client, name: str) -> None:
    found = plan(api, SMALL)
    answer = api.get(f"/v1/plans/{found['id']}/artifacts/{name}")
    assert answer.status_code in (404, 405, 422)
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "~/.bashrc", "../../x.json", "config.json", "./x.yaml", "file:///etc/passwd"]
)
def test_a_model_is_no_path(api: httpx.Client, name: str, tmp_path: Path) -> None:
    """Names that would be files on the command line are names that nobody knows."""
    told = problem_of(api.post("/v1/plans", json={**SMALL, "model": name}), 422)
    assert told["errors"][0]["pointer"] == "/model"
    assert "root" not in json.dumps(told)


def test_checks_read_no_files(api: httpx.Client, tmp_path: Path) -> None:
    """What a configuration names on disk is not opened."""
    secret = tmp_path / "config.json"
    secret.write_text(json.dumps({"model_type": SECRET, "architectures": [SECRET]}))
    script = f"torchrun pretrain_gpt.py --load {secret} --tokenizer-model {secret}\nsource {secret}\n"
    for files in (
        {"run.sh": script},
        {
            "accelerate.yaml": f"distributed_type: FSDP\nfsdp_config:\n  x: {secret}\n",
            "training_arguments.json": json.dumps({"model_name_or_path": str(tmp_path)}),
        },
        {"recipe.yaml": f"model_name_or_path: {tmp_path}\nper_device_train_batch_size: 1\n"},
    ):
        answer = api.post("/v1/checks", json={"files": files, "cluster": {"gpu": "h100", "gpus": 8}})
        assert answer.status_code in (200, 422)
        assert SECRET not in answer.text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_not_executed(api: httpx.Client, name: str, tmp_path: Path) -> None:
    """A model's name reaches scripts, YAML and Markdown as text: the shell's parts start nothing when they are read."""
    layers = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 1024, "vocab": 1000}
    dimensions = {"name": name, "max_seq": 512, **layers}
    found = plan(api, {"model": {"dimensions": dimensions}, "cluster": {"gpu": "h100", "gpus": 8}, "top": 1})
    launchers = "torchrun,slurm,trainjob,pytorchjob,skypilot,mpirun"
    listed = api.get(f"/v1/plans/{found['id']}/artifacts", params={"launcher": launchers}).json()["files"]
    assert len(listed) > 6
    for file in listed:
        text = api.get(file["href"]).text
        assert text.strip() != "49"
        if file["name"].endswith((".sh", ".sbatch")):
            path = tmp_path / file["name"]
            path.write_text(text)
            assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
            for line in text.splitlines():
                if "INJECTED" in line:
                    assert line.lstrip().startswith("#") or re.search(r"'[^']*INJECTED", line), line
    page = api.get(f"/plans/{found['id']}").text
    assert "<script>touch" not in page


def resident_bytes(service: Running) -> int:
    """Memory of the process that answers."""
    port = f"PLANNER_PORT={httpx.URL(service.url).port}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = (process / "cmdline").read_bytes().endswith(b"\0planner\0serve\0")
            if ours and port in (process / "environ").read_bytes().split(b"\0"):
                pages = int((process / "statm").read_text().split()[1])
                return pages * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    raise AssertionError("the service's process was not found")


def test_large_bodies_take_no_memory(service: Running, api: httpx.Client) -> None:
    """A gigabyte, announced or not, is refused while it comes."""
    before = resident_bytes(service)
    host, port = httpx.URL(service.url).host, httpx.URL(service.url).port or 0
    for head in (b"Content-Length: 1073741824", b"Transfer-Encoding: chunked"):
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + head + b"\r\n\r\n"
            )
            piece = b"x" * 65536
            sent = 0
            try:
                while sent < 1 << 30:
                    connection.sendall(piece if head.startswith(b"Content") else b"10000\r\n" + piece + b"\r\n")
                    sent += len(piece)
            except OSError:
                pass
            assert sent < 256 << 20
    assert resident_bytes(service) < before + (100 << 20)
    assert api.get("/healthz").status_code == 200


def test_slow_clients_hold_nobody(service: Running, api: httpx.Client) -> None:
    """Half a head and a dripped body are given up; others are answered meanwhile."""
    host, port = httpx.URL(service.url).host, httpx.URL(service.url).port or 0
    halves = [socket.create_connection((host, port), timeout=30) for _ in range(50)]
    for connection in halves:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
    dripping = socket.create_connection((host, port), timeout=30)
    dripping.sendall(b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert api.get("/healthz").status_code == 200
    answer = dripping.recv(65536)
    assert b" 408 " in answer.split(b"\r\n", 1)[0]
    for connection in halves:
        assert connection.recv(65536) == b""
        connection.close()
    dripping.close()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": NaN}',
        b'{"model": "70b", "cluster": {"gpu": "h100", "gpus": 1e999}}',
        b'{"model": "70b", "cluster": {"gpu": "h100", "gpus": ' + b"9" * 5000 + b"}}",
        b'{"model": "\\ud800", "cluster": {"gpu": "h100", "gpus": 8}}',
        b"\xff\xfe",
        b"",
        b"x" * 10_000_000,
        b'{"model": "70b", "cluster": {"gpu": "h100", "gpus": "8"}}',
        b'{"model": {"config": {"a": ' + b"[" * 150 + b"]" * 150 + b'}}, "cluster": {"gpu": "h100", "gpus": 8}}',
    ],
    ids=[
        "arrays",
        "objects",
        "NaN",
        "infinity",
        "digits",
        "surrogate",
        "bytes",
        "empty",
        "10 MB",
        "text",
        "deep config",
    ],
)
def test_odd_bodies_are_refused(api: httpx.Client, content: bytes) -> None:
    answer = api.post("/v1/plans", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (413, 422), answer.text
    problem_of(answer, answer.status_code)


def test_sql_is_text(api: httpx.Client) -> None:
    """In every text that reaches the database."""
    bad = "'; DROP TABLE plans; --"
    found = plan(api, SMALL, **{"Idempotency-Key": "';DROP-TABLE-plans;--", "X-Request-ID": bad})
    problem_of(api.get("/v1/plans", params={"after": bad}), 422)
    problem_of(api.get(f"/v1/plans/{bad}"), 422)
    api.get("/v1/catalog/models", params={"text": bad})
    problem_of(api.post("/v1/plans", json={**SMALL, "model": bad}), 422)
    problem_of(api.post("/v1/plans", json={**SMALL, "pins": {bad: bad}}), 422)
    assert api.get(f"/v1/plans/{found['id']}").status_code == 200


def test_other_names_and_pages_are_refused(api: httpx.Client) -> None:
    """A page of another site can neither use a name of its own for this machine nor send anything."""
    problem_of(api.get("/healthz", headers={"Host": "evil.example"}), 421)
    foreign = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    problem_of(api.post("/v1/plans", json=SMALL, headers=foreign), 403)
    answer = api.options("/v1/plans", headers={**foreign, "Access-Control-Request-Method": "POST"})
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    problem_of(api.post("/v1/plans", content=b"{}", headers={"Content-Type": "text/plain"}), 415)


def test_probes_need_no_name() -> None:
    """A health check of the same machine asks by the loopback's name, whatever names the service has; nobody else."""

    async def asked(path: str, host: str) -> int:
        transport = httpx.ASGITransport(HostGuard(Response("through"), ["planner.example.org"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path, headers={"Host": host})).status_code

    for path, host, status in (
        ("/healthz", "localhost", 200),
        ("/readyz", "127.0.0.1:8000", 200),
        ("/healthz", "[::1]:8000", 200),
        ("/healthz", "evil.example", 421),
        ("/v1/plans", "localhost", 421),
        ("/v1/plans", "planner.example.org", 200),
    ):
        assert asyncio.run(asked(path, host)) == status, (path, host)


@pytest.mark.parametrize("place", ["planner:{}@127.0.0.1:1/planner", "planner@127.0.0.1:1/planner?password={}"])
def test_the_database_password_is_told_to_nobody(place: str) -> None:
    """Not where the database cannot be reached."""
    url = f"postgresql://{place.format(SECRET)}"
    done = subprocess.run(
        [sys.executable, "-m", "planner", "serve", "--port", "0", "--debug"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PLANNER_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "cannot be used" in done.stderr
    assert SECRET not in done.stdout + done.stderr
