"""Limits of the connection itself, before there is a request: heads that do not come, or are too large, and too many
connections.

uvicorn has a time limit between two requests of a connection, but none for the head of a request."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from planner_api.guards.identity import begin_request, request_id
from planner_api.problems import MEDIA_TYPE, problem

HEAD_BYTES = 64 * 1024
"""Most that the first line and the headers of a request may take."""
_FIRST_LINE = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r?\n")


@dataclass(frozen=True)
class _Refusal:
    """What is answered in place of the application, and the reason that is counted."""

    reason: str
    code: str
    detail: str
    hint: str


_TOO_LARGE = _Refusal(
    "head-too-large",
    "head-too-large",
    f"the headers may have at most {HEAD_BYTES} bytes",
    "send fewer or shorter headers; what is long belongs into the body",
)
_TOO_MANY = _Refusal(
    "too-many", "not-able", "too many connections are open", "keep one connection for several requests, or try later"
)
_NOT_HTTP = _Refusal("not-http", "bad-request", "this is not HTTP", "send HTTP/1.1, without TLS")
_HOSTS = _Refusal("not-http", "bad-request", "the request has not one Host header", "send one Host header")
_METHOD = _Refusal("unknown-method", "unknown-method", "HTTP has no such method", "/openapi.json lists the methods")


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's connection, closed when a head has not come after ``head_timeout_s`` or more than ``most`` are open;
    ``refused`` hears why."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_timeout_s: float,
        most: int,
        refused: Callable[[str], None],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timeout_s, self._most, self._refused = head_timeout_s, most, refused
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: _Refusal | None = None
        self._piece = b""
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._refuse(_TOO_MANY, retry=True)
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._piece = data
        super().data_received(data)
        if self._deadline is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        self._refusal = self._wrong_head()
        if self._refusal is not None:
            raise ValueError(self._refusal.detail)  # the parser stops, and has ``send_400_response`` called
        super().on_headers_complete()

    def _wrong_head(self) -> _Refusal | None:
        """What is wrong with a head that has come as a whole, perhaps in one piece."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            return _TOO_LARGE
        hosts = sum(name == b"host" for name, _ in self.headers)
        return _HOSTS if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1") else None

    def send_400_response(self, msg: str) -> None:
        unknown = isinstance(sys.exception(), httptools.HttpParserInvalidMethodError)
        self._refuse(self._refusal or (_METHOD if unknown and _FIRST_LINE.match(self._piece) else _NOT_HTTP))

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it had not asked for another protocol."""

    def _await_head(self) -> None:
        if self._deadline is None:
            self._head_bytes = 0
            self._deadline = self.loop.call_later(self._head_timeout_s, self._too_late)

    def _too_late(self) -> None:
        """A client that has sent nothing could take an answer for that of its next request: it is only closed."""
        self._refused("head-too-late")
        self.transport.close()

    def _head_is_there(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, why: _Refusal, *, retry: bool = False) -> None:
        """Answer in place of the application, and close."""
        self._refused(why.reason)
        self._head_is_there()
        begin_request(None)
        told = problem(why.code, why.detail, hint=why.hint)
        told = told.model_copy(update={"instance": f"urn:planner:request:{request_id()}"})
        body = told.model_dump_json(exclude_none=True).encode()
        head = (
            f"HTTP/1.1 {told.status} \r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            f"cache-control: no-store\r\nx-request-id: {request_id()}\r\n"
            + ("retry-after: 1\r\n" if retry else "")
            + "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def guarded(head_timeout_s: float, most: int, refused: Callable[[str], None]) -> type[asyncio.Protocol]:
    """What ``uvicorn.Config(http=...)`` takes."""
    return partial(  # type: ignore[return-value]
        GuardedProtocol, head_timeout_s=head_timeout_s, most=most, refused=refused
    )
