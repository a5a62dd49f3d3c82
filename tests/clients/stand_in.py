"""A small HTTP server with the service's answers, made by the library: for tests of clients.

It can be told to be slow, busy or odd, which a healthy service is not."""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from planner import service
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.service import ClusterInput, JobInput, PlanRequest
from planner.service.requests import StatedModel
from planner.specs.cluster_file import ClusterFile
from planner.specs.plan import PlanDocument


@dataclass
class Behaviour:
    """How the server treats its clients."""

    token: str | None = None
    """Asked for in every request."""
    polls: int = 0
    """Answers "not yet" so many times."""
    busy: int = 0
    """Answers 503 so many times."""
    answer: tuple[int, dict[str, str], bytes] | None = None
    """Given to every request."""
    seen: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    """Method, path, headers and body of the requests so far."""
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)


def planned(body: dict[str, Any]) -> dict[str, Any]:
    """State, outcome, problem and result of a question."""
    model = body["model"]
    request = PlanRequest(
        model=StatedModel(**({"name": model} if isinstance(model, str) else model)),
        cluster=ClusterInput(file=ClusterFile(**body["cluster"])),
        job=JobInput(**body.get("job", {})),
        backend=body.get("backend", "auto"),
        pins=tuple(f"{name}={str(value).lower()}" for name, value in body.get("pins", {}).items()),
        top=body.get("top", 5),
    )
    try:
        document = service.suggest(request)
    except InfeasibleError as error:
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return {"id": key, "state": "succeeded", "outcome": "infeasible", "problem": told(error, 422), "result": None}
    return {
        "id": document.id,
        "state": "succeeded",
        "outcome": "plan",
        "problem": None,
        "result": document.to_json_dict(),
    }


def told(error: PlannerError, status: int) -> dict[str, Any]:
    """An error as problem+json."""
    document: dict[str, Any] = {
        "type": f"https://planner.invalid/problems/{error.code}",
        "title": error.code,
        "status": status,
        "detail": error.message,
        "hint": error.hint,
        "errors": [{"pointer": f"/{error.where}", "detail": error.got}] if error.where else [],
    }
    if isinstance(error, InfeasibleError):
        document["details"] = error.details
    return {name: value for name, value in document.items() if value is not None}


class Handler(BaseHTTPRequestHandler):
    """Answers by the behaviour of its server."""

    protocol_version = "HTTP/1.1"

    @property
    def behaviour(self) -> Behaviour:
        return self.server.behaviour  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._handle(json.loads(content))

    def _handle(self, body: Any) -> None:
        known = self.behaviour
        known.seen.append((self.command, self.path, dict(self.headers), body))
        if known.answer is not None:
            self._send(*known.answer)
        elif known.token is not None and self.headers.get("Authorization") != f"Bearer {known.token}":
            self._problem(401, {"title": "unauthorized", "detail": "no valid token"})
        elif known.busy > 0:
            known.busy -= 1
            self._problem(503, {"detail": "too many searches"}, {"Retry-After": "0"})
        elif self.command == "POST":
            self._plan(body)
        else:
            self._get()

    def _plan(self, body: dict[str, Any]) -> None:
        known = self.behaviour
        try:
            state = planned(body)
        except InputError as error:
            self._problem(422, told(error, 422))
            return
        known.plans[state["id"]] = state
        known.waits[state["id"]] = known.polls
        self._state(state["id"])

    def _state(self, key: str) -> None:
        known = self.behaviour
        state, links = known.plans[key], {"self": f"/v1/plans/{key}", "result": f"/v1/plans/{key}/result"}
        if known.waits[key] > 0:
            known.waits[key] -= 1
            waiting = {"id": key, "state": "running", "outcome": None, "problem": None, "links": links, "result": None}
            self._json(202, waiting, {"Location": f"/v1/plans/{key}", "Retry-After": "0"})
        else:
            self._json(200, {**state, "links": links})

    def _get(self) -> None:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        state = self.behaviour.plans.get(parts[2]) if len(parts) > 2 else None
        if parts[:2] != ["v1", "plans"] or state is None:
            self._problem(404, {"detail": "no such plan"})
        elif len(parts) == 3:
            self._state(parts[2])
        elif parts[3] == "result":
            self._json(200, state["result"])
        else:
            self._artifacts(state, parts, parse_qs(url.query).get("launcher", ["torchrun"])[0])

    def _artifacts(self, state: dict[str, Any], parts: list[str], launcher: str) -> None:
        document = PlanDocument.model_validate_json(json.dumps(state["result"]))
        files = service.render_document(document, launcher=launcher)
        if len(parts) > 4:
            self._send(200, {"Content-Type": "text/plain; charset=utf-8"}, files["/".join(parts[4:])].encode())
            return
        listed = [
            {
                "name": name,
                "bytes": len(text.encode()),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "media_type": "text/plain",
                "href": f"/v1/plans/{state['id']}/artifacts/{name}?launcher={launcher}",
            }
            for name, text in files.items()
        ]
        self._json(200, {"files": listed})

    def _problem(self, status: int, problem: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._json(
            status, {"status": status, **problem}, {"Content-Type": "application/problem+json", **(headers or {})}
        )

    def _json(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(content).encode())

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(behaviour: Behaviour, certificate: Path | None = None) -> Iterator[str]:
    """The address of such a server on a free port of this machine, until the block ends; https with a ``certificate``
    (and its key, in one file)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.behaviour = behaviour  # type: ignore[attr-defined]
    scheme, host = "http", "127.0.0.1"
    if certificate is not None:
        scheme, host = "https", "localhost"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"{scheme}://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
