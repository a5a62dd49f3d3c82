"""A small client of the service's REST interface: a question in, a plan document and its files out.

It waits as long as the service says, follows it to no other address, and keeps the token off open lines."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urljoin, urlsplit

from planner.errors import InfeasibleError, InputError, MissingExtraError, PlannerError, TimeLimitError
from planner.service.document import read_plan
from planner.specs.plan import PlanDocument
from planner.specs.problems import shown
from planner.version import __version__
from planner_api.clients.problems import document_of, error_of

try:
    import httpx
except ModuleNotFoundError as missing:
    raise MissingExtraError(
        "asking a service needs httpx", where="planner_api.clients", hint='pip install "parallel-planner[api]"'
    ) from missing

URL_VARIABLE = "PLANNER_URL"
TOKEN_VARIABLE = "PLANNER_TOKEN"  # noqa: S105 - the name of a variable
PLAIN_VARIABLE = "PLANNER_ALLOW_PLAIN_HTTP"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
"""Of one request."""
DEADLINE_S = 600.0
"""Of a whole question, waiting included."""
WAIT_S = 20
"""Seconds that the service is asked to hold an answer back until the plan is there."""
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
MAX_ANSWER_BYTES = 64 * 2**20
"""A plan document with all alternatives has less than one."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_BUSY = (429, 503)
_UNREACHABLE_HINT = f"is the service running (`planner serve`)? check --server or {URL_VARIABLE}"


class PlannerClient:
    """One service; a context manager that closes its connections."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
        allow_plain_http: bool | None = None,
    ) -> None:
        """``url`` and ``token`` are those of PLANNER_URL and PLANNER_TOKEN where they are None.

        A token is sent to other machines over https only, unless ``allow_plain_http`` (PLANNER_ALLOW_PLAIN_HTTP=1).
        Raises InputError for an address or a token that cannot be used.
        """
        self.url = _checked_url(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
        self.deadline_s = deadline_s
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        plain = os.environ.get(PLAIN_VARIABLE) == "1" if allow_plain_http is None else allow_plain_http
        local = _is_loopback(urlsplit(self.url).hostname or "")
        headers = {"User-Agent": f"parallel-planner/{__version__}", "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {_checked_token(token, self.url, allowed=plain or local)}"
        self._http = httpx.Client(
            headers=headers,
            timeout=timeout_s,
            follow_redirects=False,
            # A proxy of the environment would be handed what is meant for this machine alone.
            trust_env=not local,
            # Whose certificates are trusted, SSL_CERT_FILE and SSL_CERT_DIR say everywhere.
            verify=httpx.create_ssl_context() if self.url.startswith("https:") else True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def suggest(self, question: Mapping[str, Any], *, deadline_s: float | None = None) -> PlanDocument:
        """The plan for a question (the body of ``POST /v1/plans``).

        Raises InfeasibleError with the counted reasons when nothing fits, TimeLimitError when the search or this wait
        ended without a plan, InputError for what the service refuses, and PlannerError when it cannot be reached.
        """
        ends = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        headers = {"Prefer": f"wait={WAIT_S}"}
        answer = self._asked("POST", f"{self.url}/v1/plans", ends, headers=headers, json=dict(question))
        while True:
            state = self._object(answer)
            if state.get("state") in ("succeeded", "failed", "cancelled"):
                return self._document(state)
            self._pause(answer, ends, state.get("id"))
            answer = self._asked("GET", self._next(answer, state), ends, headers=headers)

    def artifacts(self, plan_id: str, launcher: str = "torchrun") -> dict[str, str]:
        """The files that start a plan, by relative name; ``launcher`` as for ``planner suggest``."""
        if not _ID.fullmatch(plan_id):
            raise InputError(
                "this is no id of a plan",
                where="plan id",
                got=shown(plan_id),
                allowed="64 hexadecimal digits",
                hint="take the id of the answer to the question",
            )
        ends = time.monotonic() + self.deadline_s
        listing = f"{self.url}/v1/plans/{plan_id}/artifacts?launcher={quote(launcher, safe='')}"
        entries = self._object(self._asked("GET", listing, ends)).get("files")
        if not isinstance(entries, list):
            raise self._odd("a list of files", entries)
        files: dict[str, str] = {}
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "href" not in entry:
                raise self._odd("files with name and href", entry)
            content = self._asked("GET", self._same_service(str(entry["href"])), ends).content
            if entry.get("sha256") not in (None, hashlib.sha256(content).hexdigest()):
                raise self._odd("a file with the checksum of the list", entry["name"])
            try:
                files[entry["name"]] = content.decode("utf-8")
            except UnicodeDecodeError as problem:
                raise self._odd("text files", entry["name"]) from problem
        return files

    # -- one request ---------------------------------------------------------------------------------------------------

    def _asked(self, method: str, url: str, ends: float, **request: Any) -> httpx.Response:
        """The answer, after as many tries as a busy service asks for."""
        while True:
            answer = self._sent(method, url, ends, **request)
            if answer.is_success:
                return answer
            if answer.status_code not in _BUSY or "Retry-After" not in answer.headers:
                raise self._refusal(answer)
            try:
                self._pause(answer, ends, None)
            except TimeLimitError:
                raise self._refusal(answer) from None

    def _sent(self, method: str, url: str, ends: float, **request: Any) -> httpx.Response:
        try:
            with self._http.stream(method, url, **request) as answer:
                content = bytearray()
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise self._odd(f"at most {MAX_ANSWER_BYTES} bytes", "more")
                    if time.monotonic() > ends:
                        # Each part came in time, all together did not.
                        raise httpx.ReadTimeout("the answer comes too slowly")
                # The body is decoded by now: what the headers say of its packing holds no longer.
                left = [(k, v) for k, v in answer.headers.items() if k not in ("content-encoding", "content-length")]
                return httpx.Response(answer.status_code, headers=left, content=bytes(content), request=answer.request)
        except httpx.TimeoutException as problem:
            raise PlannerError(
                "the service did not answer in time", where=self.url, hint=f"{_UNREACHABLE_HINT}; it may be busy"
            ) from problem
        except (httpx.TransportError, httpx.DecodingError) as problem:
            # Its text holds the address and the system's reason, no header.
            raise PlannerError(
                f"the service cannot be reached: {str(problem) or type(problem).__name__}",
                where=self.url,
                hint=_hint_of(problem),
            ) from problem

    def _refusal(self, answer: httpx.Response) -> PlannerError:
        if answer.is_redirect:
            target = answer.headers.get("location", "")
            return InputError(
                "the service sends to another address, which is not followed",
                where=self.url,
                got=shown(target),
                hint="give that address with --server, if it is the service's",
            )
        return error_of(document_of(answer.text), answer.status_code, self.url)

    def _pause(self, answer: httpx.Response, ends: float, plan_id: object) -> None:
        """Wait as long as the service says; TimeLimitError when that is longer than this client waits."""
        stated = answer.headers.get("Retry-After", "1")
        pause = float(stated) if stated.isascii() and stated.isdigit() and len(stated) < 6 else 1.0
        pause = min(max(pause, LEAST_PAUSE_S), LONGEST_PAUSE_S)
        if time.monotonic() + pause > ends:
            known = f" ({shown(plan_id)})" if plan_id else ""
            raise TimeLimitError(
                f"the plan is not ready yet{known}",
                where=self.url,
                hint="ask the same again later: the service goes on and keeps the answer",
            )
        time.sleep(pause)

    def _next(self, answer: httpx.Response, state: Mapping[str, Any]) -> str:
        """Where the state of a plan that is not ready is asked for."""
        links = state.get("links")
        own = links.get("self") if isinstance(links, dict) else None
        place = answer.headers.get("Location") or own or f"/v1/plans/{quote(str(state.get('id')), safe='')}"
        return self._same_service(str(place))

    def _same_service(self, place: str) -> str:
        """An address that the service names, on the service itself: nobody else is handed the token."""
        target, own = urlsplit(urljoin(f"{self.url}/", place)), urlsplit(self.url)
        if (target.scheme, target.netloc) != (own.scheme, own.netloc):
            # Behind a proxy the service may know itself by another name: the path is what counts.
            target = target._replace(scheme=own.scheme, netloc=own.netloc)
        return target.geturl()

    def _document(self, state: Mapping[str, Any]) -> PlanDocument:
        told = state.get("problem")
        problem: dict[str, Any] = told if isinstance(told, dict) else {}
        if state["state"] == "cancelled":
            raise PlannerError("the plan was cancelled on the service", where=self.url, hint="ask again")
        if state.get("outcome") == "infeasible":
            raise error_of({**problem, "code": InfeasibleError.code}, 200, self.url)
        if state.get("outcome") == TimeLimitError.code:
            raise error_of({**problem, "code": TimeLimitError.code}, 200, self.url)
        if state["state"] == "failed" or state.get("outcome") == "refused":
            status = problem.get("status")
            raise error_of(problem, status if isinstance(status, int) else 500, self.url)
        result = state.get("result")
        if not isinstance(result, dict):
            address = self._same_service(f"/v1/plans/{quote(str(state.get('id')), safe='')}/result")
            result = self._object(self._asked("GET", address, time.monotonic() + self.deadline_s))
        try:
            return read_plan(json.dumps(result), "result")
        except InputError as problem:
            place = f"{problem.where}: {problem.message}"
            raise self._odd(f"a plan document of this version ({place})", problem.got) from problem

    def _object(self, answer: httpx.Response) -> dict[str, Any]:
        content = document_of(answer.text)
        if not content:
            raise self._odd("a JSON object", answer.text[:60])
        return content

    def _odd(self, allowed: str, got: object) -> PlannerError:
        return PlannerError(
            "this is not an answer of the planner's service",
            where=self.url,
            got=shown(got),
            allowed=allowed,
            hint=f"check --server or {URL_VARIABLE}, and that client and service are of one version",
        )


def _hint_of(problem: Exception) -> str:
    """What to do where nothing came back."""
    text = str(problem)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "set SSL_CERT_FILE to a file (PEM) with the certificate of the authority that this service's is from"
    return "does this port speak https? check --server" if "SSL" in text else _UNREACHABLE_HINT


def _checked_url(text: str) -> str:
    """The address without a slash at its end."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable, parts = False, urlsplit("")
    if not usable or not text.isprintable() or " " in text or parts.query or parts.fragment:
        raise InputError(
            "this is not the address of a service",
            where="--server",
            got=shown(text.rsplit("@", 1)[-1]),
            allowed="http://HOST:PORT or https://HOST",
            hint=f"for example --server {DEFAULT_URL}",
        )
    if parts.username is not None or parts.password is not None:
        raise InputError(
            "an address holds no user or password",
            where="--server",
            hint=f"put the token into {TOKEN_VARIABLE}",
        )
    return text.rstrip("/")


def _checked_token(token: str, url: str, *, allowed: bool) -> str:
    """The token where it may be sent; no error shows it."""
    token = token.strip()
    if not _TOKEN.fullmatch(token):
        raise InputError(
            "this is not a token of the service",
            where=TOKEN_VARIABLE,
            allowed="plnr_ and letters, digits, - and _, in one line",
            hint="`planner tokens` on the server makes one",
        )
    if urlsplit(url).scheme != "https" and not allowed:
        raise InputError(
            "the token would travel unencrypted to another machine",
            where=url,
            allowed="https, or an address of this machine",
            hint=f"use https, or set {PLAIN_VARIABLE}=1 where the network is trusted",
        )
    return token


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine by its very name; names that only resolve to it are not trusted."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
