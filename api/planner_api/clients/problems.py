"""What a service's refusal means: the answer of a failed request (``application/problem+json``) as the planner's error.

An answer that is no such document (a proxy's page, an empty body) becomes an error, too, by its status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from planner.errors import (
    InfeasibleError,
    InputError,
    MeasurementError,
    MissingExtraError,
    PlannerError,
    TimeLimitError,
)

_MAX_TEXT = 2000
_BY_CODE: dict[str, type[PlannerError]] = {
    kind.code: kind for kind in (InputError, TimeLimitError, MeasurementError, MissingExtraError)
}
_ASKER_S_FAULT = range(400, 500)
_HINTS = {
    401: "set PLANNER_TOKEN to a token of this service (`planner tokens` on the server makes one)",
    403: "this token may not do that: ask whoever runs the service for one with the scope plan",
    404: "check the address of the service: it ends before /v1",
    413: "send a smaller document",
    429: "the service is asked too often: wait, and ask again",
    500: "ask again; if it stays, tell whoever runs the service, whose log says more",
    502: "the service is not behind this address at the moment: ask whoever runs it",
    503: "the service is busy or starting: ask again in a minute",
    504: "the service did not answer its proxy in time: ask again in a minute",
}


def document_of(text: str) -> dict[str, Any]:
    """The problem document of a body; empty where the body is something else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def error_of(problem: Mapping[str, Any], status: int, where: str) -> PlannerError:
    """The error that a problem document tells; ``where`` names the service for errors that are about it."""
    message = _text(problem.get("detail")) or _text(problem.get("title")) or f"the service answered {status}"
    hint = _text(problem.get("hint")) or _HINTS.get(status)
    code = str(problem.get("code") or str(problem.get("type", "")).rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1])
    if code == InfeasibleError.code:
        details = problem.get("details")
        return InfeasibleError(message, details=details if isinstance(details, dict) else {}, hint=hint)
    kind = _BY_CODE.get(code) or (InputError if status in _ASKER_S_FAULT else PlannerError)
    place, got = _first(problem.get("errors"))
    if place is None:
        place = _text(problem.get("where"))
    return kind(
        message if got is None or got in message else f"{message}: {got}",
        where=place or where,
        got=_text(problem.get("got")),
        allowed=_text(problem.get("allowed")),
        hint=hint,
    )


def _first(errors: object) -> tuple[str | None, str | None]:
    """(place, what is wrong) of the first field that is complained about."""
    if not isinstance(errors, list) or not errors or not isinstance(errors[0], dict):
        return None, None
    pointer = _text(errors[0].get("pointer"))
    return (pointer.lstrip("#/").replace("/", ".") or None if pointer else None), _text(errors[0].get("detail"))


def _text(value: object) -> str | None:
    """Printable text of a foreign document: what a terminal would take as a command is left out."""
    if not isinstance(value, str) or not value.strip():
        return None
    return "".join(char if char.isprintable() or char == "\n" else " " for char in value[:_MAX_TEXT]).strip()
