"""What routes ask for: the services, the caller with a scope, a body that was read strictly, a page of a list."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from planner_api.guards.tokens import Caller
from planner_api.problems import MOST_FIELDS, FieldProblem, ProblemError, of_validation
from planner_api.services import Services
from planner_api.storage.tokens import Scope

Body = TypeVar("Body", bound=BaseModel)


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)


_BEARER = HTTPBearer(scheme_name="token", description="Of `planner tokens create`.", auto_error=False)
"""For the description only: the gate reads the token, which may be the page's cookie, too."""


def _caller(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    async def admit(request: Request, _: Annotated[object, Depends(_BEARER)]) -> Caller:
        return await services_of(request).gate.admit(request, scope)

    return admit


async def known_parameters(request: Request) -> None:
    """Refuse parameters of the query that the route does not have, and one that is given twice; ProblemError 422."""
    known = sorted(_query_of(request.scope["route"].dependant))
    given = Counter(name for name, _ in request.query_params.multi_items())
    told = [
        FieldProblem(
            pointer=name[:100], detail="this parameter does not exist" if name not in known else "this is given twice"
        )
        for name, times in given.items()
        if name not in known or times > 1
    ][:MOST_FIELDS]
    if told:
        near = difflib.get_close_matches(told[0].pointer, known, n=1, cutoff=0.75)
        listed = f"the parameters are {', '.join(known)}" if known else "leave it out: there are no parameters"
        raise ProblemError(
            "bad-input",
            f"{told[0].pointer}: {told[0].detail}",
            errors=told,
            hint=f"did you mean {near[0]}? {listed}" if near and near[0] != told[0].pointer else listed,
        )


def _query_of(dependant: Dependant) -> set[str]:
    """Parameters of the query that a route or what it depends on takes."""
    return {field.alias for field in dependant.query_params}.union(*map(_query_of, dependant.dependencies))


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
        raise ProblemError(
            "wrong-media-type", "the body must be application/json", hint="send `Content-Type: application/json`"
        )
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
