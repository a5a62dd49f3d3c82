"""What routes ask for: the services, the caller with a scope, a body that was read strictly, a page of a list."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Path, Query, Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from planner_api.guards.tokens import Caller
from planner_api.problems import FieldProblem, ProblemError, of_validation
from planner_api.services import Services
from planner_api.storage.tokens import Scope

Body = TypeVar("Body", bound=BaseModel)


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)


def _caller(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    async def admit(request: Request) -> Caller:
        return await services_of(request).gate.admit(request, scope)

    return admit


_IDENTIFIER = re.compile(r"[0-9a-f]{64}")
_CREATED = re.compile(r"\d{1,12}(\.\d{1,12})?")
Served = Annotated[Services, Depends(services_of)]
Reader = Annotated[Caller, Depends(_caller("read"))]
Asker = Annotated[Caller, Depends(_caller("plan"))]
Admin = Annotated[Caller, Depends(_caller("admin"))]
PlanId = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="Id of a plan.")]
Limit = Annotated[int, Query(ge=1, le=200, description="Most entries of a page.")]
After = Annotated[str | None, Query(max_length=200, description="From the link to the next page.")]


async def read_body(request: Request, model: type[Body]) -> Body:
    """The body as JSON, strictly: no other types, unknown fields, NaN or deep nesting.

    Raises ProblemError 415 and 422."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ProblemError("wrong-media-type", "the body must be application/json")
    content = await request.body()
    try:
        return model.model_validate_json(content, strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        told = of_validation(errors, None if errors[0]["type"] == "json_invalid" else from_json(content))
        raise ProblemError.of(told) from None


def cursor(created: float, identifier: str) -> str:
    """Where the next page of a list by time begins."""
    return base64.urlsafe_b64encode(f"{created!r} {identifier}".encode()).decode().rstrip("=")


def read_cursor(text: str | None) -> tuple[float, str] | None:
    """What ``cursor`` wrote; ProblemError 422 for anything else."""
    if text is None:
        return None
    try:
        created, _, identifier = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().partition(" ")
        if not _CREATED.fullmatch(created) or not _IDENTIFIER.fullmatch(identifier):
            raise ValueError(text)
        return float(created), identifier
    except (binascii.Error, UnicodeError, ValueError):
        told = FieldProblem(pointer="after", detail="this is no place in a list")
        raise ProblemError("bad-input", told.detail, errors=[told], hint="follow the links") from None
