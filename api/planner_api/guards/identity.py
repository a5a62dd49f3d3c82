"""The id of the request at hand: the caller's where it is usable, else a new one."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

_GIVEN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_current: ContextVar[str] = ContextVar("request_id", default="none")


def begin_request(given: str | None) -> str:
    """Set and return the id."""
    name = given if given is not None and _GIVEN.fullmatch(given) else uuid.uuid4().hex
    _current.set(name)
    return name


def request_id() -> str:
    return _current.get()
