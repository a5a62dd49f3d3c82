"""Everything that goes wrong as problem+json (RFC 9457): one type a cause, with pointers into the body and a hint.

Errors of the library speak of options of the command line; here they speak of fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from pydantic_core import ErrorDetails

from planner.errors import InfeasibleError, PlannerError
from planner.specs.base import Spec

MEDIA_TYPE = "application/problem+json"

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


class Problem(Spec):
    """What went wrong, and what to do about it."""

    type: str = Field(examples=["urn:planner:problem:bad-input"])
    """Stable: ``urn:planner:problem:`` and a code."""
    title: str
    status: int = Field(ge=100, le=599)
    detail: str
    instance: str | None = None
    """Id of the request, as in the log."""
    errors: tuple[FieldProblem, ...] = ()
    hint: str | None = None
    allowed: str | None = None
    details: dict[str, Any] | None = None
    """Of a question without a plan: the counted reasons, the nearest miss, what would help."""


class ProblemError(Exception):
    """A problem to answer with."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        hint: str | None = None,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = problem(code, detail, hint=hint, errors=errors)
        self.headers = dict(headers or {})


def problem(
    code: str,
    detail: str,
    *,
    hint: str | None = None,
    allowed: str | None = None,
    errors: Sequence[FieldProblem] = (),
    details: dict[str, Any] | None = None,
) -> Problem:
    """The problem of a code of ``TITLES``."""
    status, title = TITLES[code]
    return Problem(
        type=f"urn:planner:problem:{code}",
        title=title,
        status=status,
        detail=detail,
        errors=tuple(errors),
        hint=hint,
        allowed=allowed,
        details=details,
    )


def of_planner_error(error: PlannerError) -> Problem:
    """An error of the library."""
    code = error.code if error.code in TITLES else "internal-error"
    detail = in_fields(error.message)
    if error.got is not None and error.got not in detail:
        detail += f" (got {error.got})"
    pointer = None if error.where is None else pointer_of(error.where)
    return problem(
        code,
        detail,
        hint=None if error.hint is None else in_fields(error.hint),
        allowed=None if error.allowed is None else in_fields(error.allowed),
        errors=() if pointer is None else (FieldProblem(pointer=pointer, detail=detail),),
        details=_in_fields(error.details) if isinstance(error, InfeasibleError) else None,
    )


def of_validation(errors: Sequence[ErrorDetails], place: str = "") -> Problem:
    """Complaints of pydantic about a body."""
    found = tuple(
        FieldProblem(pointer=place + _pointer(error["loc"]), detail=error["msg"].removeprefix("Value error, "))
        for error in errors[:20]
    )
    first = found[0]
    detail = f"{first.pointer or 'the body'}: {first.detail}" + (f" (and {len(found) - 1} more)" if found[1:] else "")
    return problem("bad-input", detail, errors=found, hint="the description of every field is in /openapi.json")


def _pointer(place: Sequence[str | int]) -> str:
    """JSON pointer; union members, which pydantic names, are no part of the body."""
    kept = [str(part) for part in place if not (isinstance(part, str) and part.startswith(("function-", "tagged-")))]
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in kept)


_FIELDS = {
    "model": "/model",
    "backend": "/backend",
    "pin": "/pins",
    "profile": "/profile",
    "top": "/top",
    "time-limit": "/time_limit_s",
    "cluster": "/cluster",
    "gpu": "/cluster/gpu",
    "gpus": "/cluster/gpus",
    "nodes": "/cluster/nodes",
    "gpus-per-node": "/cluster/gpus_per_node",
    "nics": "/cluster/nics_per_node",
    "nic-gbps": "/cluster/nic_gbps",
    "oversubscription": "/cluster/oversubscription",
    "host-memory-gib": "/cluster/host_memory_gib",
    "price": "/cluster/price_usd_per_gpu_hour",
    "seq-len": "/job/seq_len",
    "global-batch": "/job/global_batch",
    "precision": "/job/precision",
    "loss": "/job/loss",
    "memory-margin": "/job/memory_margin",
    "objective": "/job/objective",
    "launcher": "launcher",
    "format": "/format",
    "suggest": "/suggest",
    **{
        name: f"/strategy/{name.replace('-', '_')}"
        for name in (
            *("tp", "pp", "vpp", "cp", "ep", "etp", "zero-stage", "shard-degree", "secondary-shard-degree"),
            *("micro-batch", "sequence-parallel", "schedule", "recompute", "offload", "layers-per-stage"),
        )
    },
}
"""Option of the command line -> field of a body."""
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?: (?!--)([\w.:+=/-]+))?")
_NAMES = {"model": "/model", "accelerator": "/cluster/gpu", "system": "/cluster/system"}
"""What the catalogue calls a name that it does not have -> field of a body."""
_PLACES = ("model.", "cluster.", "job.", "strategy.")


def pointer_of(where: str) -> str | None:
    """The field that an error of the library is about."""
    found = _OPTION.match(where)
    if found is not None:
        pointer = _FIELDS.get(found[1])
        return f"/pins/{found[2]}" if found[1] == "pin" and found[2] else pointer
    if where in _NAMES:
        return _NAMES[where]
    if where.startswith(_PLACES):
        return "/" + where.replace(": ", ".").replace(".", "/")
    return None


def in_fields(text: str) -> str:
    """A sentence about options as one about fields: ``--gpus 64`` becomes ``gpus = 64``."""

    def field(match: re.Match[str]) -> str:
        if match[1] not in _FIELDS:
            return match[0]
        name = _FIELDS[match[1]].strip("/").replace("/", ".")
        if match[1] == "pin" and match[2]:
            return f"pins.{match[2].replace('=', ' = ')}"
        return name + (f" = {match[2]}" if match[2] and not match[2].isalpha() else f" {match[2]}" if match[2] else "")

    text = _OPTION.sub(field, text)
    return (
        text.replace("`planner models`", "/v1/catalog/models")
        .replace("`planner gpus`", "/v1/catalog/gpus")
        .replace("`planner backends`", "/v1/catalog/backends")
    )


def _in_fields(value: Any) -> Any:
    """The same for every text of a document."""
    if isinstance(value, str):
        return in_fields(value)
    if isinstance(value, dict):
        return {key: _in_fields(item) for key, item in value.items()}
    return [_in_fields(item) for item in value] if isinstance(value, (list, tuple)) else value
