"""The REST client against a server: waiting, refusals, odd answers, and where a token may go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from planner.errors import InfeasibleError, InputError, PlannerError, TimeLimitError
from planner_api.clients.rest import PlannerClient
from tests.clients.running import running_service
from tests.clients.stand_in import Behaviour, serving

QUESTION = {"model": "gpt2-124m", "cluster": {"gpu": "a100", "gpus": 8}, "backend": "fsdp"}
TOKEN = "plnr_abcDEF012345"


def test_a_plan_and_its_files(service_url: str) -> None:
    """The document of the library, and the files that start it, checksums compared."""
    with PlannerClient(service_url) as client:
        document = client.suggest(QUESTION)
        assert document.best.backend == "fsdp"
        assert document.best.strategy.gpus == 8
        files = client.artifacts(document.id, "slurm")
    assert {"launch.sh", "job.sbatch", "plan.json", "README.md"} <= set(files)
    assert json.loads(files["plan.json"])["id"] == document.id


def test_polls_until_ready(stand_in: str, behaviour: Behaviour) -> None:
    """202 is followed to its Location; the question is asked once, and asks the service to wait."""
    behaviour.polls = 3
    with PlannerClient(stand_in) as client:
        assert client.suggest(QUESTION).best.strategy.gpus == 8
    methods = [method for method, *_ in behaviour.seen]
    assert methods == ["POST", "GET", "GET", "GET"]
    assert behaviour.seen[0][2]["Prefer"] == "wait=20"


def test_a_busy_service_is_asked_again(stand_in: str, behaviour: Behaviour) -> None:
    """503 with Retry-After is waited for."""
    behaviour.busy = 2
    with PlannerClient(stand_in) as client:
        assert client.suggest(QUESTION).best.backend == "fsdp"


def test_no_longer_than_the_deadline(stand_in: str, behaviour: Behaviour) -> None:
    """A plan that is not ready in time ends with its id and a hint; a busy service with its own words."""
    behaviour.polls = 10**6
    with PlannerClient(stand_in, deadline_s=0.5) as client:
        with pytest.raises(TimeLimitError, match="not ready") as caught:
            client.suggest(QUESTION)
        assert "later" in str(caught.value)
        behaviour.busy = 10**6
        with pytest.raises(PlannerError, match="too many searches"):
            client.suggest(QUESTION)


def test_infeasible_with_reasons(service_url: str) -> None:
    """What the library says of a question without a plan: reasons, nearest miss and hint."""
    with PlannerClient(service_url) as client, pytest.raises(InfeasibleError) as caught:
        client.suggest({"model": "405b", "cluster": {"gpu": "a100", "gpus": 8}})
    assert caught.value.details["nearest"]
    assert caught.value.hint


def test_bad_input_names_the_field(service_url: str) -> None:
    """A refused question is the error of the library, with its hint."""
    with PlannerClient(service_url) as client, pytest.raises(InputError) as caught:
        client.suggest({"model": "no-such-model-anywhere", "cluster": {"gpu": "a100", "gpus": 8}})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (200, b"<html>welcome</html>", "not an answer of the planner"),
        (200, b'{"state": "succeeded", "outcome": "plan", "result": {"schema_version": 99}}', "this version"),
        (200, b"[]", "not an answer"),
        (502, b"<html>bad gateway</html>", "answered 502"),
        (500, b'{"detail": "it \\u001b[31mbroke"}', r"it  \[31mbroke"),
        (404, b"", "answered 404"),
        (307, b"", "another address"),
    ],
    ids=["page", "other-version", "list", "gateway", "escape-codes", "not-there", "redirect"],
)
def test_odd_answers(stand_in: str, behaviour: Behaviour, status: int, content: bytes, says: str) -> None:
    """Whatever stands behind an address, the end is an error with a hint."""
    behaviour.answer = (status, {"Location": "https://elsewhere.invalid/"} if status == 307 else {}, content)
    with PlannerClient(stand_in, TOKEN) as client, pytest.raises(PlannerError, match=says) as caught:
        client.suggest(QUESTION)
    assert caught.value.hint
    assert TOKEN not in str(caught.value)


def test_nobody_there() -> None:
    """A closed port is a clean error with a hint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        PlannerClient(f"http://127.0.0.1:{port}") as client,
        pytest.raises(PlannerError, match="cannot be reached") as e,
    ):
        client.suggest(QUESTION)
    assert "planner serve" in str(e.value)


def test_an_answer_that_never_ends() -> None:
    """A service that sends a byte now and then is left at the deadline."""
    ended = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not ended.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with PlannerClient(url, deadline_s=0.5) as client, pytest.raises(PlannerError, match="in time"):
                client.suggest(QUESTION)
        finally:
            ended.set()
            thread.join(timeout=10)


def test_token_is_sent_and_asked_for(stand_in: str, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of the environment reaches the service; without one the error names the variable."""
    behaviour.token = TOKEN
    with PlannerClient(stand_in) as client, pytest.raises(InputError, match="no valid token") as caught:
        client.suggest(QUESTION)
    assert "PLANNER_TOKEN" in str(caught.value)
    monkeypatch.setenv("PLANNER_TOKEN", TOKEN)
    monkeypatch.setenv("PLANNER_URL", stand_in)
    with PlannerClient() as client:
        assert client.suggest(QUESTION).best.backend == "fsdp"
        assert TOKEN not in repr(client)


@pytest.mark.parametrize("url", ["http://planner.example", "http://10.0.0.7:8000", "http://127.0.0.1.example"])
def test_token_stays_off_open_lines(url: str) -> None:
    """No token over plain http to another machine unless that is allowed."""
    with pytest.raises(InputError, match="unencrypted") as caught:
        PlannerClient(url, TOKEN)
    assert TOKEN not in str(caught.value)
    PlannerClient(url, TOKEN, allow_plain_http=True).close()
    PlannerClient(url).close()
    PlannerClient(url.replace("http:", "https:"), TOKEN).close()


def test_a_token_goes_to_the_service_only(stand_in: str, behaviour: Behaviour) -> None:
    """Where the service names another host for its plan, its own is asked."""
    other = Behaviour()
    with serving(other) as elsewhere:
        key = "a" * 64
        waiting = {"id": key, "state": "running", "links": {"self": f"{elsewhere}/v1/plans/{key}"}}
        headers = {"Location": f"{elsewhere}/v1/plans/{key}", "Retry-After": "0", "Content-Type": "application/json"}
        behaviour.answer = (202, headers, json.dumps(waiting).encode())
        with PlannerClient(stand_in, TOKEN, deadline_s=0.6) as client, pytest.raises(TimeLimitError):
            client.suggest(QUESTION)
    assert other.seen == []
    assert [path for _, path, *_ in behaviour.seen[1:]] == [f"/v1/plans/{key}"] * (len(behaviour.seen) - 1)


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "planner", "http://", "http://u:p@host", "http://host/?x=1", "http://ho st", "http://host:99999"],
)
def test_addresses_that_cannot_be_used(url: str) -> None:
    """An address that is none is refused, and a password in it is not shown."""
    with pytest.raises(InputError) as caught:
        PlannerClient(url)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "x" * 600])
def test_tokens_that_cannot_be_used(token: str) -> None:
    """A token that would break a header is refused and not shown."""
    with pytest.raises(InputError) as caught:
        PlannerClient("https://host", token)
    assert token not in str(caught.value)


@pytest.mark.parametrize("plan_id", ["../x", "", "a b", "x?launcher=y"])
def test_ids_that_are_none(stand_in: str, plan_id: str) -> None:
    """An id becomes part of an address only if it is one."""
    with PlannerClient(stand_in) as client, pytest.raises(InputError):
        client.artifacts(plan_id)


def test_a_changed_file_is_noticed(stand_in: str, behaviour: Behaviour) -> None:
    """A file without the checksum of its list is refused."""
    listing = {"files": [{"name": "launch.sh", "sha256": "0" * 64, "href": "/x"}]}
    behaviour.answer = (200, {}, json.dumps(listing).encode())
    with PlannerClient(stand_in) as client, pytest.raises(PlannerError, match="not an answer"):
        client.artifacts("a" * 64)


def test_the_service_with_tokens_and_no_patience(tmp_path: Path) -> None:
    """A service that asks for tokens and never holds an answer: refused without one, followed to the end with one."""
    settings = {"PLANNER_REQUIRE_TOKENS": "true", "PLANNER_QUICK_WAIT_S": "0", "PLANNER_LONGEST_WAIT_S": "0"}
    with running_service(tmp_path, **settings) as url:
        with PlannerClient(url) as client, pytest.raises(InputError, match="no token") as caught:
            client.suggest(QUESTION)
        assert caught.value.hint
        made = subprocess.run(
            [sys.executable, "-m", "planner", "tokens", "create", "scheduler", "--scope", "plan"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PLANNER_DATABASE_URL": f"sqlite:///{tmp_path}/plans.db",
            },
            capture_output=True,
            text=True,
            check=True,
        )
        with PlannerClient(url, made.stdout.strip()) as client:
            document = client.suggest(QUESTION)
            assert document.best.strategy.gpus == 8
            assert "launch.sh" in client.artifacts(document.id)
        with PlannerClient(url, made.stdout.strip() + "x") as client, pytest.raises(InputError, match="not known"):
            client.suggest(QUESTION)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_certificates(tmp_path: Path, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority of one's own is SSL_CERT_FILE's, on this machine as elsewhere; who does not know it is told so."""
    both = tmp_path / "both.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*make.split(), "-keyout", both, "-out", tmp_path / "cert.pem"], check=True, capture_output=True)
    both.write_bytes(both.read_bytes() + (tmp_path / "cert.pem").read_bytes())
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    behaviour.answer = (401, {}, b"")
    with serving(behaviour, both) as url:
        with PlannerClient(url) as client, pytest.raises(PlannerError, match="cannot be reached") as unknown:
            client.suggest({})
        assert "SSL_CERT_FILE" in str(unknown.value.hint)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        with PlannerClient(url) as client, pytest.raises(PlannerError, match="401") as known:
            client.suggest({})
        assert "PLANNER_TOKEN" in str(known.value.hint)
    with serving(behaviour) as url, PlannerClient(url.replace("http:", "https:")) as client:
        with pytest.raises(PlannerError, match="cannot be reached") as plain:
            client.suggest({})
        assert "speak https" in str(plain.value.hint)
