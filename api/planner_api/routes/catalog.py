"""What the planner knows: models, accelerators and frameworks, in pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from planner import service
from planner.version import __version__
from planner_api.openapi import answer, problems
from planner_api.problems import FieldProblem, ProblemError
from planner_api.routes.answers import etag_of, unchanged
from planner_api.routes.dependencies import After, Limit, Reader
from planner_api.schemas.answers import CatalogPage

router = APIRouter(prefix="/v1/catalog", tags=["catalog"])

Text = Annotated[str, Query(max_length=100, description="Only entries with this in their name.")]
_PAGE = {**problems(), 200: answer(CatalogPage, "A page.", ETag="Of this page.", Link="To the next page.")}


@cache
def _backends() -> list[dict[str, Any]]:
    # Every framework's space is walked for it: once is enough.
    return service.list_backends("")


_LISTS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "models": service.list_models,
    "gpus": service.list_gpus,
    "backends": lambda text: [row for row in _backends() if text.lower() in str(row["id"]).lower()],
}


@router.get("/models", response_model=None, responses=_PAGE)
def models(request: Request, _: Reader, text: Text = "", limit: Limit = 100, after: After = None) -> Response:
    """Models of the catalogue."""
    return _page(request, "models", text, limit, after)


@router.get("/gpus", response_model=None, responses=_PAGE)
def gpus(request: Request, _: Reader, text: Text = "", limit: Limit = 100, after: After = None) -> Response:
    """Accelerators, and the node that is assumed for each."""
    return _page(request, "gpus", text, limit, after)


@router.get("/backends", response_model=None, responses=_PAGE)
def backends(request: Request, _: Reader, text: Text = "", limit: Limit = 100, after: After = None) -> Response:
    """What each framework can run, and its rules."""
    return _page(request, "backends", text, limit, after)


def _page(request: Request, kind: str, text: str, limit: int, after: str | None) -> Response:
    etag = etag_of(__version__, kind, text, str(limit), after or "")
    known = unchanged(request, etag)
    if known is not None:
        return known
    rows = _LISTS[kind](text)
    names = [str(row.get("id", row.get("name"))) for row in rows]
    if after is not None and after not in names:
        told = FieldProblem(pointer="after", detail="this is no entry of the list")
        raise ProblemError("bad-input", told.detail, errors=[told], hint="follow the links")
    first = 0 if after is None else names.index(after) + 1
    shown = rows[first : first + limit]
    more = first + limit < len(rows)
    query = urlencode({"text": text, "limit": limit, "after": names[first + limit - 1]}) if more else ""
    following = f"/v1/catalog/{kind}?{query}" if more else None
    headers = {"ETag": etag, **({"Link": f'<{following}>; rel="next"'} if following else {})}
    return JSONResponse({"items": shown, "total": len(rows), "next": following}, headers=headers)
