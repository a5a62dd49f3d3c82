"""What the page shows below its form and around it: a plan, how far it is, or what is wrong, as HTML."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from planner.backends import BACKENDS
from planner.errors import PlannerError
from planner.render.engine import fill_html
from planner.service import list_gpus, list_models
from planner.service.questions import plan_question
from planner.service.summary import misfit_text
from planner.specs.plan import PlanDocument
from planner.units import count, duration
from planner_api.page.comparison import Difference, differences
from planner_api.page.form import LABELS, Form, as_form, field_of
from planner_api.page.sending import assets_version
from planner_api.page.sliders import sliders
from planner_api.problems import FieldProblem, Problem, ProblemError, of_planner_error
from planner_api.problems import problem as made_problem
from planner_api.routes.jobs import document_of, job
from planner_api.routes.plans import accepted, finished
from planner_api.services import Services
from planner_api.solving import tasks
from planner_api.storage.plans import PlanRow

LAUNCHERS = ("torchrun", "slurm", "trainjob", "pytorchjob", "skypilot", "mpirun")
LOOK_AGAIN_S = 3
"""Browsers without scripts load a page that waits again."""


@dataclass(frozen=True)
class Answer:
    """A part of the page."""

    status: int
    html: Markup
    title: str
    refresh: str = ""
    """Content of a refresh for browsers without scripts: seconds and address."""


async def answer_to(asked: Form, served: Services, *, held_s: float) -> Answer:
    """The answer to what the form asks, after at most ``held_s`` seconds."""
    if not asked.asks:
        missing = [] if not asked.values else [name for name in ("model", "gpu") if not asked[name]]
        return Answer(200, filled("page/welcome.html.j2", {"missing": missing}), "Plan a training run")
    try:
        if asked.too_long:
            raise ProblemError(
                "bad-input",
                "the pasted model is too long for the address of a page",
                hint="leave out what does not describe the model's size, or send it to POST /v1/plans",
                errors=[FieldProblem(pointer="/model", detail="this is too long")],
            )
        question = asked.question()
        plan = plan_question(question.asked(None, served.settings.solve_time_limit_s)).id
        row = await finished(await accepted(plan, question, None, served), held_s, served)
    except ProblemError as refused:
        return wrong(refused.problem, asked)
    except PlannerError as error:
        return wrong(of_planner_error(error), asked)
    # Looked at again by its own address: asking again would start a plan that has failed anew, for ever.
    base = asked["base"] or None
    return await shown(row, asked, base, served, plan_address(plan, base))


def plan_address(plan: str, base: str | None) -> str:
    """Where a plan is shown, compared with ``base``."""
    return f"/plans/{plan}" + ("" if base is None else f"?{urlencode({'base': base})}")


async def shown(row: PlanRow, asked: Form, base: str | None, served: Services, address: str, rank: int = 1) -> Answer:
    """A plan as it is; ``address`` shows it again, ``rank`` says which of its plans."""
    if not row.finished:
        title = "Cancelling" if row.cancel else "Waiting for a free worker" if row.state == "queued" else "Searching"
        html = filled("page/progress.html.j2", {"job": job(row), "address": address, "title": title})
        return Answer(200, html, title, f"{LOOK_AGAIN_S}; url={address}")
    if row.outcome != "plan":
        told = job(row).problem or made_problem("conflict", f"the plan was {row.state}", hint="ask again")
        again = "" if row.outcome else asked.address()
        answer = wrong(told, asked, infeasible=row.outcome is not None, again=again)
        return replace(answer, status=200) if row.state != "failed" else answer
    text = await document_of(row, served)
    document = PlanDocument.model_validate_json(text)
    title = title_of(document)
    context = {
        "title": title,
        "section": await _section(row.id, document, rank, text, served),
        "base": base or row.id,
        "restart": asked.address(base=""),
        "differences": await _differences(base, row.id, document, served),
        "effective": Markup(json.dumps(_effective(document))),  # noqa: S704  (numbers)
    }
    return Answer(200, filled("page/answer.html.j2", context), title)


def title_of(document: PlanDocument) -> str:
    """The verdict in one line, as a browser lists it among its tabs."""
    estimate, request = document.best.estimate, document.request
    verdict = "fits" if estimate.fits else misfit_text(estimate)
    machines = f"{request.cluster.gpus} x {request.cluster.accelerator.id}"
    return f"{duration(estimate.step_time_s)}, {verdict} - {request.model.name} on {machines}"


async def _section(plan: str, document: PlanDocument, rank: int, text: str, served: Services) -> Markup:
    """The plan's part of the page, drawn in another process and remembered."""
    ranks = 1 + len(document.alternatives)
    if rank > ranks:
        raise ProblemError("not-found", f"there is no plan {rank}", hint=f"the answer has {ranks}")
    known = served.sections.get((plan, rank))
    if known is None:
        context = {"plan": plan, "launchers": LAUNCHERS, "rank": rank, "ranks": range(1, ranks + 1)}
        actions = str(filled("page/take.html.j2", context))
        known = await served.quick.run(tasks.section, text, actions, rank, limit_s=served.settings.quick_time_limit_s)
        served.sections[plan, rank] = known
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


def wrong(told: Problem, asked: Form, *, infeasible: bool = False, again: str = "") -> Answer:
    """What is wrong, with the way to the fields; that nothing fits is an answer like any other."""
    errors = [_named(each, asked) for each in told.errors]
    context = {"problem": told, "errors": errors, "infeasible": infeasible, "again": again}
    return Answer(200 if infeasible else told.status, filled("page/problem.html.j2", context), told.title)


def _named(error: FieldProblem, asked: Form) -> tuple[str | None, str, str]:
    field = field_of(error.pointer)
    if field == "model" and asked["config"]:
        field = "config"
    return field, LABELS.get(field or "", ""), error.detail


def whole(asked: Form, answer: Answer, served: Services) -> Markup:
    """The page with its form."""
    context = {
        "form": asked,
        "models": [(row["id"], f"{count(row['params'])} parameters") for row in list_models()],
        "gpus": [row["id"] for row in list_gpus()],
        "backends": [(name, name) for name in BACKENDS],
        "sliders": sliders(asked),
        "answer": answer.html,
    }
    return framed("page/page.html.j2", answer.title, context, served, answer.refresh)


def part(answer: Answer) -> str:
    """The answer alone, with the title that htmx gives the page."""
    return str(filled("page/part.html.j2", {"title": answer.title, "answer": answer.html}))


async def listing(rows: list[PlanRow], following: str | None, served: Services) -> Markup:
    """Plans that were asked for, with the words of their questions."""
    context = {"rows": [await _listed(row, served) for row in rows], "following": following}
    return framed("page/plans.html.j2", "Plans", context, served)


async def _listed(row: PlanRow, served: Services) -> dict[str, str]:
    asked = await asked_for(row.id, served)
    model = asked["model"] or "a model of its own"
    state = {"infeasible": "nothing fits", "time-limit": "out of time"}.get(row.outcome or "", row.state)
    return {
        "id": row.id,
        "name": f"{model} on {asked['gpus'] or 'some'} x {asked['gpu'] or 'GPUs'}",
        "state": state,
        "asked_at": job(row).created_at,
        "address": asked.address(),
    }


async def asked_for(plan: str, served: Services) -> Form:
    """The form that asks for a stored plan."""
    question = await served.plans.question(plan)
    return Form.of({}) if question is None else as_form(json.loads(question)["body"])


def framed(template: str, title: str, context: dict[str, Any], served: Services, refresh: str = "") -> Markup:
    """A template inside the frame of all pages."""
    frame = {
        "title": title, "refresh": refresh, "assets": assets_version(), "tokens": served.settings.tokens_required,
    }  # fmt: skip
    return filled(template, {**context, **frame})


def filled(template: str, context: dict[str, Any]) -> Markup:
    return Markup(fill_html(template, context))  # noqa: S704  (made by a template that escapes)
