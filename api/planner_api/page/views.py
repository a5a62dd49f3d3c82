"""What the page shows below its form and around it: a plan, how far it is, or what is wrong, as HTML."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from planner.errors import PlannerError
from planner.render.engine import fill_html
from planner.service import list_gpus, list_models
from planner.service.questions import plan_question
from planner.service.summary import misfit_text
from planner.specs.plan import PlanDocument
from planner.units import count, duration
from planner_api.page.comparison import Difference, differences
from planner_api.page.form import CHOICES, LABELS, UNITS, Form, as_form
from planner_api.page.sending import assets_version
from planner_api.page.sliders import sliders
from planner_api.page.telling import told
from planner_api.problems import FieldProblem, Problem, ProblemError, of_planner_error
from planner_api.problems import problem as made_problem
from planner_api.routes.artifacts import alone, file_stem
from planner_api.routes.jobs import document_of, job
from planner_api.routes.plans import accepted, finished
from planner_api.services import Services
from planner_api.solving import tasks
from planner_api.storage.plans import PlanRow

LAUNCHERS = ("torchrun", "slurm", "trainjob", "pytorchjob", "skypilot", "mpirun")
LOOK_AGAIN_S = 3
"""Browsers without scripts load a page that waits again."""

OUTCOMES = {"plan": "fits", "infeasible": "nothing fits", "refused": "cannot be", "time-limit": "out of time"}
"""How a search ended, in the list of plans."""
OWN_COLUMNS = ("model", "config", "gpu", "gpus", "seq_len", "global_batch")
"""Fields of a question that have a column of the list; the others stand together in one."""


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
        missing = asked.missing if asked.values else []
        return Answer(200, filled("page/welcome.html.j2", {"missing": missing}), "Plan a training run")
    try:
        if asked.too_long:
            raise ProblemError(
                "bad-input",
                "the pasted model is too long for the address of a page",
                hint="leave out what does not describe the model's size, or send it to the REST API",
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


def plan_address(plan: str, base: str | None, rank: int = 1) -> str:
    """Where one plan of an answer is shown, compared with ``base``."""
    query = urlencode(({} if base is None else {"base": base}) | ({"rank": rank} if rank > 1 else {}))
    return f"/plans/{plan}" + (f"?{query}" if query else "")


async def shown(row: PlanRow, asked: Form, base: str | None, served: Services, address: str, rank: int = 1) -> Answer:
    """A plan as it is; ``address`` shows it again, ``rank`` says which of its plans."""
    if not row.finished:
        title = "Cancelling" if row.cancel else "Waiting for a free worker" if row.state == "queued" else "Searching"
        html = filled("page/progress.html.j2", {"job": job(row), "address": address, "title": title})
        return Answer(200, html, title, f"{LOOK_AGAIN_S}; url={address}")
    if row.outcome != "plan":
        ended = _without_a_plan(row)
        again = "" if row.outcome or ended.errors else asked.address()
        answer = wrong(ended, asked, again=again)
        # That nothing fits, or that somebody wanted no plan, is an answer like any other.
        return answer if row.state == "failed" else replace(answer, status=200)
    text = await document_of(row, served)
    whole_answer = PlanDocument.model_validate_json(text)
    document = alone(whole_answer, rank)
    title = (f"Plan {rank}: " if rank > 1 else "") + title_of(document)
    context = {
        "title": title,
        "section": await _section(row.id, rank, 1 + len(whole_answer.alternatives), text, served),
        "base": base or row.id,
        "restart": asked.address(base=""),
        "differences": await _differences(base, row.id, document, served),
        "effective": Markup(json.dumps(_effective(document))),  # noqa: S704  (numbers)
    }
    return Answer(200, filled("page/answer.html.j2", context), title)


def _without_a_plan(row: PlanRow) -> Problem:
    """Why a finished search has none."""
    if row.problem is not None:
        return Problem.model_validate_json(row.problem)
    if row.state == "cancelled":
        cancelled = made_problem("conflict", "the plan was cancelled", hint=None)
        return cancelled.model_copy(update={"title": "Cancelled"})
    return made_problem("solver-failed", "the search ended without a plan", hint=None)


def title_of(document: PlanDocument) -> str:
    """The verdict in one line, as a browser lists it among its tabs."""
    estimate, request = document.best.estimate, document.request
    verdict = "fits" if estimate.fits else misfit_text(estimate)
    machines = f"{request.cluster.gpus} x {request.cluster.accelerator.id}"
    return f"{duration(estimate.step_time_s)}, {verdict} - {request.model.name} on {machines}"


async def _section(plan: str, rank: int, ranks: int, text: str, served: Services) -> Markup:
    """The plan's part of the page, drawn in another process and remembered."""
    known = served.sections.get((plan, rank))
    if known is None:
        context = {
            "plan": plan, "launchers": LAUNCHERS, "rank": rank, "ranks": range(1, ranks + 1),
            "stem": file_stem(plan, rank),
        }  # fmt: skip
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
    """What is in force where the form leaves it open or says it in another way."""
    request, task = document.request, document.request.job
    margin = round(100 * task.memory_margin, 6)
    values = {"gpus": request.cluster.gpus, "seq_len": task.seq_len, "global_batch": task.global_batch}
    return {**values, "memory_margin": margin}


def wrong(problem: Problem, asked: Form, *, again: str = "") -> Answer:
    """What is wrong, with the way to the fields and to what would help; ``again`` asks the same once more."""
    context = {"problem": told(problem, asked, again), "heading": "h2"}
    return Answer(problem.status, filled("page/problem.html.j2", context), problem.title)


def whole(asked: Form, answer: Answer, served: Services) -> Markup:
    """The page with its form."""
    context = {
        "form": asked,
        "models": [(row["id"], f"{count(row['params'])} parameters") for row in list_models()],
        "gpus": [row["id"] for row in list_gpus()],
        "choices": CHOICES,
        "sliders": sliders(asked),
        "answer": answer.html,
    }
    return framed("page/page.html.j2", answer.title, context, served, answer.refresh)


def part(answer: Answer) -> str:
    """The answer alone, with the title that htmx gives the page."""
    return str(filled("page/part.html.j2", {"title": answer.title, "answer": answer.html}))


def refusal(problem: Problem, served: Services, *, whole_page: bool) -> Markup:
    """What is wrong where no form is to be filled in."""
    context = {"problem": told(problem, Form.of({})), "heading": "h1" if whole_page else "h2"}
    template = "page/refused.html.j2" if whole_page else "page/problem.html.j2"
    return framed(template, problem.title, context, served)


async def listing(rows: list[PlanRow], following: str | None, served: Services) -> Markup:
    """Plans that were asked for, with the words of their questions."""
    questions = await served.plans.questions([row.id for row in rows])
    listed = [_listed(row, _form_of(questions.get(row.id))) for row in rows]
    return framed("page/plans.html.j2", "Plans", {"rows": listed, "following": following}, served)


def _listed(row: PlanRow, asked: Form) -> dict[str, str]:
    """What tells a plan from others in the list, without a look at its result."""
    model = asked["model"] or "a model of its own"
    rest = [name for name in LABELS if asked[name] and name not in OWN_COLUMNS]
    return {
        "id": row.id,
        "name": f"{model} on {asked['gpus'] or 'some'} x {asked['gpu'] or 'GPUs'}",
        "seq_len": asked["seq_len"] or "usual",
        "global_batch": asked["global_batch"] or "usual",
        "rest": "; ".join(f"{LABELS[name]}: {asked[name]}{UNITS.get(name, '')}" for name in rest),
        "verdict": OUTCOMES.get(row.outcome or "", row.state),
        "asked_at": job(row).created_at,
        "address": asked.address(),
    }


async def asked_for(plan: str, served: Services) -> Form:
    """The form that asks for a stored plan."""
    return _form_of((await served.plans.questions([plan])).get(plan))


def _form_of(question: str | None) -> Form:
    return Form.of({}) if question is None else as_form(json.loads(question)["body"])


def framed(template: str, title: str, context: dict[str, Any], served: Services, refresh: str = "") -> Markup:
    """A template inside the frame of all pages."""
    frame = {
        "title": title, "refresh": refresh, "assets": assets_version(), "tokens": served.settings.tokens_required,
    }  # fmt: skip
    return filled(template, {**context, **frame})


def filled(template: str, context: dict[str, Any]) -> Markup:
    return Markup(fill_html(template, context))  # noqa: S704  (made by a template that escapes)
