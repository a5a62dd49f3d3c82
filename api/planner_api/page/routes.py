"""The page's addresses: the form with its answer, a stored plan, downloads, and signing in with a token."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Request
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from planner.backends import BACKENDS
from planner.errors import PlannerError
from planner.render.engine import fill_html
from planner.service import list_gpus, list_models
from planner.service.questions import plan_question
from planner.specs.plan import PlanDocument
from planner.units import count
from planner_api.guards.tokens import COOKIE
from planner_api.page.comparison import Difference, differences
from planner_api.page.form import Form as Asked
from planner_api.page.form import as_form, field_of
from planner_api.page.sliders import sliders
from planner_api.problems import Problem, ProblemError, of_planner_error
from planner_api.routes.dependencies import PlanId, Served
from planner_api.routes.jobs import document_of, job, known_plan
from planner_api.routes.plans import accepted, finished
from planner_api.services import Services
from planner_api.solving import tasks
from planner_api.storage.plans import PlanRow

router = APIRouter(include_in_schema=False)

HOLD_S = 0.8
"""A plan that is made quicker than this is shown without a sign that it is being made."""
LAUNCHERS = ("torchrun", "slurm", "trainjob", "pytorchjob", "skypilot", "mpirun")
DAY_S = 24 * 3600


@router.get("/")
async def page(request: Request, served: Served) -> Response:
    """The form, and the answer to what the address asks; for htmx the answer alone."""
    signed_in = await _admitted(request, served)
    if signed_in is not None:
        return signed_in
    asked = Asked.of(request.query_params)
    part = request.headers.get("hx-request") == "true" and request.headers.get("hx-history-restore-request") != "true"
    status, answer = await _answer(asked, served, held=HOLD_S)
    if part:
        # htmx shows what comes with 200 only.
        return _html(answer)
    return _html(_whole(asked, answer, served), status)


@router.get("/plans/{plan}")
async def stored(plan: PlanId, request: Request, served: Served) -> Response:
    """A plan that somebody asked for, whoever it was, with a way to change the question."""
    signed_in = await _admitted(request, served)
    if signed_in is not None:
        return signed_in
    row = await known_plan(plan, served)
    question = await served.plans.question(plan)
    asked = as_form(json.loads(question or "{}")["body"])
    status, answer = await _shown(row, asked, None, served, f"/plans/{plan}")
    return _html(_whole(asked, answer, served), status)


@router.get("/plans/{plan}/report.{form}")
async def report(plan: PlanId, form: str, request: Request, served: Served) -> Response:
    """The report as one file, to keep or to send."""
    signed_in = await _admitted(request, served)
    if signed_in is not None:
        return signed_in
    if form not in tasks.REPORTS:
        raise ProblemError("not-found", "there is no such report", hint=f"report.{' or report.'.join(tasks.REPORTS)}")
    text = await document_of(await known_plan(plan, served), served)
    made = await served.quick.run(tasks.report, text, form, limit_s=served.settings.quick_time_limit_s)
    kind = {"html": "text/html; charset=utf-8", "md": "text/markdown; charset=utf-8"}[form]
    name = f"plan-{plan[:12]}.{form}"
    return Response(made, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


@router.get("/login")
async def login(served: Served, back: str = "/") -> Response:
    """Where a token is given."""
    return _html(_framed("page/login.html.j2", {"problem": "", "back": _own(back)}, served))


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
        return _html(_framed("page/login.html.j2", context, served), 403)
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
    return address if address.startswith("/") and not address.startswith(("//", "/\\")) else "/"


async def _admitted(request: Request, served: Services) -> Response | None:
    """None for whoever may ask for plans, else the way to sign in."""
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


async def _answer(asked: Asked, served: Services, *, held: float) -> tuple[int, Markup]:
    """Status and the part of the page below the form."""
    if not asked.asks:
        missing = [] if not asked.values else [name for name in ("model", "gpu") if not asked[name]]
        return 200, _filled("page/welcome.html.j2", {"missing": missing})
    try:
        question = asked.question()
        plan = plan_question(question.asked(None, served.settings.solve_time_limit_s)).id
        row = await finished(await accepted(plan, question, None, served), held, served)
    except ProblemError as refused:
        return refused.problem.status, _problem(refused.problem)
    except PlannerError as error:
        return 422, _problem(of_planner_error(error))
    return await _shown(row, asked, asked["base"] or None, served, asked.address())


async def _shown(row: PlanRow, asked: Asked, base: str | None, served: Services, address: str) -> tuple[int, Markup]:
    if not row.finished:
        return 200, _filled("page/progress.html.j2", {"job": job(row), "address": address})
    if row.outcome != "plan":
        told = job(row).problem
        if told is None:
            told = ProblemError("conflict", f"the plan was {row.state}", hint="ask again").problem
        return 200 if row.outcome else 500, _problem(told, infeasible=row.outcome is not None)
    text = await document_of(row, served)
    document = PlanDocument.model_validate_json(text)
    context = {
        "section": await _section(row.id, text, served),
        "base": base or row.id,
        "restart": asked.address(base=""),
        "differences": await _differences(base, row.id, document, served),
        "effective": Markup(json.dumps(_effective(document))),  # noqa: S704  (numbers)
    }
    return 200, _filled("page/answer.html.j2", context)


async def _section(plan: str, text: str, served: Services) -> Markup:
    """The plan's part of the page, drawn in another process and remembered."""
    known = served.sections.get(plan)
    if known is None:
        actions = str(_filled("page/take.html.j2", {"plan": plan, "launchers": LAUNCHERS}))
        known = await served.quick.run(tasks.section, text, actions, limit_s=served.settings.quick_time_limit_s)
        served.sections[plan] = known
    return Markup(known)  # noqa: S704  (made by a template that escapes)


async def _differences(base: str | None, plan: str, now: PlanDocument, served: Services) -> list[Difference]:
    if base is None or base == plan or len(base) != 64:
        return []
    before = await served.plans.result(base)
    return [] if before is None else differences(PlanDocument.model_validate_json(before), now)


def _effective(document: PlanDocument) -> dict[str, Any]:
    """What the sliders stand at where the form leaves it open."""
    request = document.request
    job = request.job
    return {"gpus": request.cluster.gpus, "seq_len": job.seq_len, "global_batch": job.global_batch}


def _problem(told: Problem, *, infeasible: bool = False) -> Markup:
    errors = [(field_of(each.pointer), each.detail) for each in told.errors]
    return _filled("page/problem.html.j2", {"problem": told, "errors": errors, "infeasible": infeasible})


def _whole(asked: Asked, answer: Markup, served: Services) -> Markup:
    models = [(row["id"], f"{count(row['params'])} parameters") for row in list_models()]
    gpus = [row["id"] for row in list_gpus()]
    context = {
        "form": asked,
        "models": models,
        "gpus": gpus,
        "backends": [(name, name) for name in BACKENDS],
        "sliders": sliders(asked),
        "answer": answer,
    }
    return _framed("page/page.html.j2", context, served)


def _framed(template: str, context: dict[str, Any], served: Services) -> Markup:
    return _filled(template, {**context, "tokens": served.settings.tokens_required})


def _filled(template: str, context: dict[str, Any]) -> Markup:
    return Markup(fill_html(template, context))  # noqa: S704  (made by a template that escapes)


def _html(text: str, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "Vary": "HX-Request, Cookie"}
    return Response(text, status_code=status, media_type="text/html", headers=headers)
