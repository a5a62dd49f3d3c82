"""The page's addresses: the form with its answer, a stored plan, downloads, and signing in with a token."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import RedirectResponse, Response

from planner.specs.plan import PlanDocument
from planner_api.guards.tokens import COOKIE
from planner_api.page.form import Form as Asked
from planner_api.page.views import (
    Answer,
    answer_to,
    asked_for,
    framed,
    listing,
    part,
    plan_address,
    refusal,
    shown,
    whole,
)
from planner_api.problems import Problem, ProblemError, of_parameters
from planner_api.routes.artifacts import Rank, alone, file_stem
from planner_api.routes.dependencies import After, Limit, PlanId, Served, cursor, read_cursor, services_of
from planner_api.routes.jobs import document_of, known_plan, no_plan
from planner_api.routes.plans import finished
from planner_api.services import Services
from planner_api.solving import tasks


class PageRoute(APIRoute):
    """Says what is wrong with a request on a page."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_or_tell(request: Request) -> Response:
            try:
                return await answer(request)
            except ProblemError as refused:
                return _refused(request, refused.problem, refused.headers)
            except RequestValidationError as error:
                mistyped = any(complaint["loc"][0] == "path" for complaint in error.errors())
                return _refused(request, no_plan().problem if mistyped else of_parameters(error.errors()))

        return answer_or_tell


router = APIRouter(include_in_schema=False, route_class=PageRoute)

HOLD_S = 0.8
"""A plan that is made quicker than this is shown without a sign that it is being made."""
DAY_S = 24 * 3600


@router.get("/")
async def page(request: Request, served: Served) -> Response:
    """The form, and the answer to what the address asks; for htmx the answer alone."""
    turned_away = await _admitted(request, served)
    if turned_away is not None:
        return turned_away
    asked = Asked.of(request.query_params)
    return _answered(request, asked, await answer_to(asked, served, held_s=HOLD_S), served)


@router.get("/plans")
async def plans(request: Request, served: Served, limit: Limit = 25, after: After = None) -> Response:
    """What was asked for, the youngest first."""
    turned_away = await _admitted(request, served)
    if turned_away is not None:
        return turned_away
    rows = await served.plans.page(limit + 1, read_cursor(after))
    last = rows[limit - 1] if len(rows) > limit else None
    following = None if last is None else f"/plans?limit={limit}&after={cursor(last.created_at, last.id)}"
    return _html(await listing(rows[:limit], following, served))


@router.get("/plans/{plan}")
async def stored(
    plan: PlanId,
    request: Request,
    served: Served,
    rank: Rank = 1,
    base: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """A plan that somebody asked for, whoever it was, with a way to change the question."""
    turned_away = await _admitted(request, served)
    if turned_away is not None:
        return turned_away
    row = await finished(await known_plan(plan, served), HOLD_S, served)
    asked = await asked_for(plan, served)
    address = plan_address(plan, base, rank)
    return _answered(request, asked, await shown(row, asked, base, served, address, rank), served)


@router.post("/plans/{plan}/cancel")
async def cancel(plan: PlanId, request: Request, served: Served) -> Response:
    """End the search for a plan, also for others who wait for it."""
    turned_away = await _admitted(request, served)
    if turned_away is not None:
        return turned_away
    await known_plan(plan, served)
    await served.plans.cancel(plan)
    return RedirectResponse(f"/plans/{plan}", status_code=303)


@router.get("/plans/{plan}/report.{form}")
async def report(plan: PlanId, form: str, request: Request, served: Served, rank: Rank = 1) -> Response:
    """The report about one plan of the answer as one file, to keep or to send."""
    turned_away = await _admitted(request, served)
    if turned_away is not None:
        return turned_away
    if form not in tasks.REPORTS:
        raise ProblemError("not-found", "there is no such report", hint=f"report.{' or report.'.join(tasks.REPORTS)}")
    text = await document_of(await known_plan(plan, served), served)
    alone(PlanDocument.model_validate_json(text), rank)
    made = await served.quick.run(tasks.report, text, form, rank, limit_s=served.settings.quick_time_limit_s)
    kind = {"html": "text/html; charset=utf-8", "md": "text/markdown; charset=utf-8"}[form]
    headers = {"Content-Disposition": f'attachment; filename="{file_stem(plan, rank)}.{form}"'}
    return Response(made, media_type=kind, headers=headers)


@router.get("/login")
async def login(served: Served, back: str = "/") -> Response:
    """Where a token is given."""
    return _html(framed("page/login.html.j2", "Sign in", {"problem": "", "back": _own(back)}, served))


@router.post("/login")
async def sign_in(
    request: Request,
    served: Served,
    token: Annotated[str, Form(max_length=200)] = "",
    back: Annotated[str, Form(max_length=40_000)] = "/",
) -> Response:
    """Keep the token in a cookie that scripts and other sites cannot use."""
    found = await served.tokens.find(token.strip())
    if found is None or not found.valid:
        context = {"problem": "This token is not known, was revoked or has expired.", "back": _own(back)}
        return _html(framed("page/login.html.j2", "Sign in", context, served), 403)
    answer = RedirectResponse(_own(back), status_code=303)
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, token.strip(), max_age=DAY_S, httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/logout")
async def sign_out() -> Response:
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE)
    return answer


def _own(address: str) -> str:
    """An address of this page, whatever was given: no way to other sites."""
    # Browsers drop tabs and line ends and read a backslash as a slash.
    plain = address.isprintable() and "\\" not in address
    return address if plain and address.startswith("/") and not address.startswith("//") else "/"


async def _admitted(request: Request, served: Services) -> Response | None:
    """None for whoever may ask for plans, else the way to sign in; ProblemError for tokens that may not."""
    try:
        await served.gate.admit(request, "plan")
    except ProblemError as refused:
        if refused.problem.status == 403:
            raise
        place = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        target = f"/login?back={quote(place, safe='')}"
        if request.headers.get("hx-request") == "true":
            return Response(status_code=204, headers={"HX-Redirect": target})
        return RedirectResponse(target, status_code=303)
    return None


def _refused(request: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    part_only = _for_htmx(request)
    told = refusal(problem, services_of(request), whole_page=not part_only)
    answer = _html(told, 200 if part_only else problem.status)
    answer.headers.update(headers or {})
    return answer


def _answered(request: Request, asked: Asked, answer: Answer, served: Services) -> Response:
    # htmx shows what comes with 200 only.
    return _html(part(answer)) if _for_htmx(request) else _html(whole(asked, answer, served), answer.status)


def _for_htmx(request: Request) -> bool:
    """Whether a part of the page is asked for."""
    headers = request.headers
    return headers.get("hx-request") == "true" and headers.get("hx-history-restore-request") != "true"


def _html(text: str, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "Vary": "HX-Request, Cookie"}
    return Response(text, status_code=status, media_type="text/html", headers=headers)
