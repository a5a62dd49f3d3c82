"""Limits of the service and of its connections: what is over them is told as a problem, at once, and others go on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from planner_api.guards.rates import _counted
from planner_api.serving import configured
from planner_api.settings import Settings
from tests.api.conftest import Running, in_process
from tests.api.questions import PROBLEM, SMALL, plan, problem_of
from tests.clients.running import running_service

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with few connections."""
    folder = tmp_path_factory.mktemp("narrow")
    limits = {"PLANNER_CONNECTION_LIMIT": "8", "PLANNER_RATE_LIMIT": "", "PLANNER_HEADER_TIMEOUT_S": "2"}
    with running_service(folder, **limits) as url:
        yield Running(url, folder)


def connected(service: Running) -> socket.socket:
    url = httpx.URL(service.url)
    return socket.create_connection((url.host, url.port or 0), timeout=30)


def everything(connection: socket.socket) -> bytes:
    """All that comes until the service closes."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def raw_problem(received: bytes, status: int) -> dict[str, Any]:
    """The problem of an answer that was made without the application."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {status} "), lines[0]
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["content-type"] == PROBLEM
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    told: dict[str, Any] = json.loads(body)
    assert told["status"] == status
    assert told["instance"] == f"urn:planner:request:{headers['x-request-id']}"
    return told


def test_too_many_connections_are_refused(narrow: Running) -> None:
    """With a problem; those that are open go on, and when one ends there is room again."""
    with ExitStack() as stack:
        first = [stack.enter_context(connected(narrow)) for _ in range(8)]
        first[0].sendall(HEAD + b"\r\n")
        assert b" 200 " in first[0].recv(65536)
        with connected(narrow) as late:
            told = raw_problem(everything(late), 503)
            assert "connections" in told["detail"]
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        with connected(narrow) as again:
            again.sendall(HEAD + b"Connection: close\r\n\r\n")
            if everything(again).startswith(b"HTTP/1.1 200"):
                return
    raise AssertionError("closed connections still count")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /heal", HEAD, HEAD + b"\r\n" + HEAD], ids=["nothing", "half a line", "no end", "second request"]
)
def test_a_head_that_does_not_come_ends_the_connection(narrow: Running, sent: bytes) -> None:
    """The first of a connection, and one on a connection that was used before."""
    with connected(narrow) as connection:
        connection.sendall(sent)
        received = everything(connection)
    assert received.count(b"HTTP/1.1 ") == sent.count(b"\r\n\r\n")


def test_a_head_that_drips_has_no_more_time(narrow: Running) -> None:
    with connected(narrow) as connection:
        connection.sendall(HEAD)
        connection.settimeout(0.1)
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            try:
                connection.sendall(b"x")
                if connection.recv(100) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    raise AssertionError("the connection is still open")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"not HTTP\r\n\r\n", 400),
        (HEAD + b"X: " + b"x" * 400_000, 431),
        (HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (HEAD + b"Host: localhost\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"FOO /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"GET /" + b"x" * 400_000, 431),
        (b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400),
    ],
    ids=["garbage", "header", "whole header", "two hosts", "no host", "method", "address", "two lengths"],
)
def test_heads_that_are_none_are_refused(narrow: Running, sent: bytes, status: int) -> None:
    with connected(narrow) as connection:
        with suppress(OSError):  # it may be refused before all was sent
            connection.sendall(sent)
        try:
            received = everything(connection)
        except ConnectionResetError:
            return
    assert raw_problem(received, status)["hint"]


def test_a_head_as_large_as_it_may_be_is_taken(narrow: Running) -> None:
    with connected(narrow) as connection:
        connection.sendall(HEAD + b"Connection: close\r\nX: " + b"x" * 65_000 + b"\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 200")


def test_refused_connections_are_counted(narrow: Running) -> None:
    """No route sees them, so nothing else would tell."""

    def count(reason: str) -> float:
        line = f'planner_connections_refused_total{{reason="{reason}"}} '
        numbers = httpx.get(f"{narrow.url}/metrics", trust_env=False).text
        found = [text.removeprefix(line) for text in numbers.splitlines() if line in text]
        return float(found[0]) if found else 0.0

    for reason, sent in (("not-http", b"not HTTP\r\n\r\n"), ("head-too-late", b"GET /heal")):
        before = count(reason)
        with connected(narrow) as connection:
            connection.sendall(sent)
            everything(connection)
        assert count(reason) == before + 1


def test_an_upgrade_is_not_taken(narrow: Running) -> None:
    with connected(narrow) as connection:
        connection.sendall(HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "TRACE", "ODD"])
def test_methods_that_are_none(api: httpx.Client, method: str) -> None:
    answer = api.request(method, "/v1/plans")
    assert answer.status_code == (501 if method == "ODD" else 405)
    assert answer.headers["content-type"] == PROBLEM
    if method != "ODD":
        assert answer.headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/estimates", "POST"),
        ("/healthz", "GET, HEAD"),
        (f"/v1/plans/{'0' * 64}", "DELETE, GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/static/page/page.css", "GET, HEAD"),
    ],
)
def test_methods_that_are_there_are_named(api: httpx.Client, path: str, methods: str) -> None:
    answer = api.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/metrics", "/v1/plans", "/v1/catalog/gpus?limit=1", "/openapi.json", "/", "/v1/no"]
)
def test_a_head_is_answered_like_a_get(api: httpx.Client, path: str) -> None:
    told, got = api.head(path), api.get(path)
    assert (told.status_code, told.content) == (got.status_code, b"")
    assert told.headers["content-type"] == got.headers["content-type"]
    if path not in ("/metrics", "/v1/plans"):  # these change between two requests
        assert told.headers.get("content-length") == got.headers.get("content-length")


def test_a_head_where_only_posts_are_taken(api: httpx.Client) -> None:
    told = api.head("/v1/estimates")
    assert (told.status_code, told.content, told.headers["allow"]) == (405, b"", "POST")


def test_rates_are_limited_by_address(tmp_path: Path) -> None:
    async def ask() -> None:
        async with in_process(tmp_path, rate_limit="3/minute") as (client, _):
            told = [await client.get("/v1/catalog/gpus?limit=1") for _ in range(5)]
            assert [answer.status_code for answer in told] == [200, 200, 200, 429, 429]
            problem_of(told[-1], 429)
            assert 1 <= int(told[-1].headers["retry-after"]) <= 60
            # Probes are free, and a token that is made up is no other address.
            assert (await client.get("/healthz")).status_code == 200
            more = await client.get("/v1/plans", headers={"Authorization": "Bearer plnr_made_up"})
            assert more.status_code == 429

    asyncio.run(ask())


def test_rates_are_limited_by_token(tmp_path: Path) -> None:
    """Tokens of one address have a share each; wrong ones and none use up the address's own."""

    async def ask() -> None:
        async with in_process(tmp_path, rate_limit="4/minute", require_tokens=True) as (client, app):
            made = [(await app.state.services.tokens.create(name, "read", None))[1] for name in "ab"]

            async def told(token: str) -> int:
                headers = {"Authorization": f"Bearer {token}"}
                return (await client.get("/v1/catalog/gpus?limit=1", headers=headers)).status_code

            assert [await told(made[0]) for _ in range(5)] == [200, 200, 200, 200, 429]
            assert [await told(made[1]) for _ in range(2)] == [200, 200]
            assert [await told(f"plnr_{number}_x") for number in range(5)] == [401, 401, 401, 401, 429]
            assert [await told(made[1]) for _ in range(3)] == [200, 200, 429]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("proxies", "peer", "statuses"),
    [
        ("10.1.0.0/16", "10.1.2.3", [200, 200, 429]),
        ("127.0.0.1,::1", "10.1.2.3", [200, 429, 429]),
    ],
)
def test_a_trusted_proxy_says_who_asks(tmp_path: Path, proxies: str, peer: str, statuses: list[int]) -> None:
    async def ask() -> None:
        async with in_process(tmp_path, rate_limit="1/minute", trusted_proxies=proxies) as (_, app):
            services = app.state.services
            config = configured(app, services.settings, services.metrics)
            config.load()
            transport = httpx.ASGITransport(app=config.loaded_app, client=(peer, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for address, status in zip(("192.0.2.1", "192.0.2.2", "192.0.2.1"), statuses, strict=True):
                    headers = {"X-Forwarded-For": f"203.0.113.9, {address}"}
                    answer = await client.get("/v1/catalog/gpus?limit=1", headers=headers)
                    assert answer.status_code == status

    asyncio.run(ask())


@pytest.mark.parametrize("proxies", ["*", "proxy.example.org", "10.0.0.1/8"])
def test_proxies_are_named_by_address(proxies: str) -> None:
    with pytest.raises(ValueError, match="addresses and networks"):
        Settings(trusted_proxies=proxies)


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2::5", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::5%eth0", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_of_one_network_are_one(address: str, counted: str) -> None:
    assert _counted(address) == counted


def test_a_full_queue_refuses_new_plans_only(tmp_path: Path) -> None:
    """Nobody works here: what is put into the queue stays there."""

    async def ask() -> None:
        async with in_process(tmp_path, workers=0, queue_limit=1) as (client, _):
            first = await client.post("/v1/plans", json=SMALL, headers={"Prefer": "wait=0"})
            assert (first.status_code, first.json()["state"]) == (202, "queued")
            other = {**SMALL, "top": 1}
            refused = await client.post("/v1/plans", json=other, headers={"Idempotency-Key": "a"})
            assert problem_of(refused, 503)["type"] == "urn:planner:problem:queue-full"
            assert refused.headers["retry-after"]
            known = await client.post("/v1/plans", json=SMALL, headers={"Prefer": "wait=0"})
            assert known.json()["id"] == first.json()["id"]
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert "full" in ready.json()["checks"]["queue"]
            assert (await client.delete(first.headers["location"])).json()["state"] == "cancelled"
            # There is room again, and the key of the refused request is free.
            again = await client.post("/v1/plans", json=SMALL, headers={"Idempotency-Key": "a", "Prefer": "wait=0"})
            assert again.status_code == 202

    asyncio.run(ask())


def test_one_key_is_one_request_at_a_time(tmp_path: Path) -> None:
    """While the first is held, the second is told to wait; afterwards it has the same answer."""

    async def ask() -> None:
        async with in_process(tmp_path, workers=0) as (client, _):
            headers = {"Idempotency-Key": uuid.uuid4().hex, "Prefer": "wait=3"}
            first = asyncio.create_task(client.post("/v1/plans", json=SMALL, headers=headers))
            while (await client.get("/v1/plans")).json()["plans"] == []:
                await asyncio.sleep(0.02)
            second = await client.post("/v1/plans", json=SMALL, headers=headers)
            assert problem_of(second, 409)["type"] == "urn:planner:problem:conflict"
            assert second.headers["retry-after"]
            held = await first
            third = await client.post("/v1/plans", json=SMALL, headers={**headers, "Prefer": "wait=0"})
            assert third.status_code == held.status_code == 202
            assert third.json()["id"] == held.json()["id"]

    asyncio.run(ask())


def test_requests_have_ids(service: Running, api: httpx.Client) -> None:
    """The caller's own where it can be used; in the answer, in the problem and in the log."""
    mine = f"job.42-{uuid.uuid4().hex}"
    answer = api.get("/no-such-place", headers={"X-Request-ID": mine})
    assert answer.headers["x-request-id"] == mine
    assert problem_of(answer, 404)["instance"].endswith(mine)
    # The line is written when the answer has left.
    ends = time.monotonic() + 30
    while mine not in service.log and time.monotonic() < ends:
        time.sleep(0.05)
    logged = [line for line in map(json.loads, service.log.splitlines()) if line.get("request") == mine]
    assert [(line["event"], line["status"], line["method"]) for line in logged] == [("request", 404, "GET")]
    for odd in ("a b", "x" * 65, "é", '"', "a;b"):
        given = api.get("/healthz", headers=[(b"X-Request-ID", odd.encode())]).headers["x-request-id"]
        assert len(given) == 32
        assert given != odd


def test_odd_bodies_take_no_time(api: httpx.Client) -> None:
    """Deep, long or huge bodies are refused as fast as usual ones are answered, give or take their size."""
    plan(api, SMALL)

    def seconds(content: bytes) -> float:
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            api.post("/v1/plans", content=content, headers={"Content-Type": "application/json"})
            taken.append(time.perf_counter() - started)
        return min(taken)

    usual = seconds(json.dumps(SMALL).encode())
    wide = b'{"model": {"dimensions": {' + b",".join(b'"f%d": 1' % number for number in range(100_000)) + b"}}}"
    many = b'{"model": "1b", "pins": {' + b",".join(b'"p%d": 1' % number for number in range(100_000)) + b"}}"
    for odd in (b"[" * 1_000_000, b'{"a":' * 300_000, b"9" * 1_900_000, b'"' + b"\\u0041" * 300_000 + b'"', wide, many):
        assert seconds(odd) < 100 * usual + 1
