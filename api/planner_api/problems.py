"""Everything that goes wrong as problem+json (RFC 9457): one type a cause, with pointers into the body and a hint.

Errors of the library speak of options of the command line; here they speak of fields (``wording``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import Field
from pydantic_core import ErrorDetails

from planner.errors import InfeasibleError, PlannerError
from planner.specs.base import Spec
from planner_api.wording import in_fields, pointers_of, told_in_fields

MEDIA_TYPE = "application/problem+json"
TYPE = "urn:planner:problem:"
TOO_LONG = f"{TYPE}took-too-long"
MOST_FIELDS = 20
"""Fields that one problem names."""

TITLES: Mapping[str, tuple[int, str]] = {
    "bad-request": (400, "The request cannot be read"),
    "no-token": (401, "A token is needed"),
    "wrong-scope": (403, "The token does not allow this"),
    "foreign-page": (403, "Another site may not do this"),
    "not-found": (404, "There is nothing here"),
    "method-not-allowed": (405, "The method is not supported here"),
    "not-acceptable": (406, "No such representation"),
    "slow-request": (408, "The request did not arrive in time"),
    "conflict": (409, "The request meets another one"),
    "not-ready": (409, "The plan is not there yet"),
    "too-large": (413, "The request is too large"),
    "wrong-media-type": (415, "The body is not JSON"),
    "wrong-host": (421, "The service is not reached under this name"),
    "bad-input": (422, "A value cannot be used"),
    "key-reused": (422, "The idempotency key was used for another request"),
    "no-plan-fits": (422, "No plan fits"),
    "time-limit": (422, "The time limit ended the search before a plan was found"),
    "too-many-requests": (429, "Too many requests"),
    "head-too-large": (431, "The headers are too large"),
    "unknown-method": (501, "The method is not known"),
    "internal-error": (500, "The service failed"),
    "solver-failed": (500, "The solver process failed"),
    "out-of-memory": (500, "The work took more memory than it may"),
    "queue-full": (503, "Too many plans are waiting"),
    "shutting-down": (503, "The service is ending"),
    "not-able": (503, "The service cannot plan now"),
    "took-too-long": (503, "The work took longer than it may"),
}


class FieldProblem(Spec):
    """One field that cannot be used."""

    pointer: str
    """JSON pointer (RFC 6901) into the body; ``query`` or ``header`` names begin without a slash."""
    detail: str
    """What is wrong with it."""


class Problem(Spec):
    """What went wrong, and what to do about it."""

    type: str = Field(examples=["urn:planner:problem:bad-input"])
    """Stable: ``urn:planner:problem:`` and a code."""
    title: str
    """The same for every problem of this type."""
    status: int = Field(ge=100, le=599)
    """Status of the answer."""
    detail: str
    """What is wrong here, in a sentence."""
    instance: str | None = None
    """Id of the request, as in the log."""
    errors: tuple[FieldProblem, ...] = ()
    """The fields that are wrong."""
    hint: str | None = None
    """What to do about it."""
    allowed: str | None = None
    """What would be accepted."""
    details: dict[str, Any] | None = None
    """Of a question without a plan: the counted reasons, the nearest miss, what would help."""


class ProblemError(Exception):
    """A problem to answer with; without a hint is only what came without one."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        hint: str | None,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = problem(code, detail, hint=hint, errors=errors)
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, told: Problem) -> ProblemError:
        """A problem that is there already, whole."""
        error = cls("bad-request", told.detail, hint=told.hint)
        error.problem = told
        return error


def problem(
    code: str,
    detail: str,
    *,
    hint: str | None,
    allowed: str | None = None,
    errors: Sequence[FieldProblem] = (),
    details: dict[str, Any] | None = None,
) -> Problem:
    """The problem of a code of ``TITLES``."""
    status, title = TITLES[code]
    return Problem(
        type=TYPE + code,
        title=title,
        status=status,
        detail=detail,
        errors=tuple(errors),
        hint=hint,
        allowed=allowed,
        details=details,
    )


def of_planner_error(error: PlannerError, files: Collection[str] = (), own: Mapping[str, str] | None = None) -> Problem:
    """An error of the library.

    ``files`` are names that it may speak of, ``own`` the places of fields that this body has elsewhere
    (``/strategy/recompute`` -> ``/recompute``)."""
    code = error.code if error.code in TITLES else "internal-error"
    detail = in_fields(error.message, own)
    if error.got is not None and error.got not in detail:
        detail += f" (got {error.got})"
    pointers = () if error.where is None else pointers_of(error.where, files, own)
    return problem(
        code,
        detail,
        hint=None if error.hint is None else in_fields(error.hint, own),
        allowed=None if error.allowed is None else in_fields(error.allowed, own),
        errors=[FieldProblem(pointer=pointer, detail=detail) for pointer in pointers],
        details=told_in_fields(error.details) if isinstance(error, InfeasibleError) else None,
    )


def of_parameters(errors: Sequence[ErrorDetails]) -> Problem:
    """Complaints of the framework about parameters in the path, the query and the headers, which are named."""
    return _of_fields([FieldProblem(pointer=str(error["loc"][-1]), detail=_said(error)) for error in errors])


def of_validation(errors: Sequence[ErrorDetails], content: Any, place: str = "") -> Problem:
    """Complaints of pydantic about ``content``, which stands at ``place`` of the body."""
    # Of a value that may have several forms, every form complains: one that takes its type, or what is said about a
    # part of it, is what is wrong.
    taken = {_pointer(error, content) for error in errors if not error["type"].endswith("_type")}
    found = {
        (place + _pointer(error, content), _said(error)): None
        for error in errors
        if not error["type"].endswith("_type") or _pointer(error, content) not in taken
    }
    told = [
        FieldProblem(pointer=pointer, detail=detail)
        for pointer, detail in found
        if not any(other.startswith(f"{pointer}/") for other, _ in found)
    ]
    return _of_fields(told)


def _of_fields(found: Sequence[FieldProblem]) -> Problem:
    first = found[0]
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    detail = f"{first.pointer or 'the body'}: {first.detail}{more}"
    hint = "the description of every field is in /openapi.json"
    return problem("bad-input", detail, errors=found[:MOST_FIELDS], hint=hint)


def _said(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _pointer(error: ErrorDetails, content: Any) -> str:
    """JSON pointer of a complaint; names of types, which pydantic puts between, are no part of the body."""
    kept: list[str] = []
    *_, last = error["loc"] or ("",)
    for part in error["loc"]:
        inside = part in content if isinstance(content, dict) else False
        if isinstance(content, list) and isinstance(part, int) and part < len(content):
            inside = True
        if inside:
            content = content[part]
        elif part is not last or error["type"] != "missing":
            continue
        kept.append(str(part).replace("~", "~0").replace("/", "~1"))
    return "".join(f"/{part}" for part in kept)
