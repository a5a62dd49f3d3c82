"""A change of strategy in the words of the framework's files: what to write and what to leave out.

The renderer writes both strategies, and what its files say differently is the change; nothing is spelt twice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from planner.errors import PlannerError
from planner.service.document import make_document, strategy_id
from planner.specs.check import LEAVE_OUT
from planner.specs.plan import Plan, PlanDocument, Request, SearchReport
from planner.specs.strategy import Strategy


def spelt(
    request: Request, files: Mapping[str, str], old: Strategy, new: Plan, lacking: Collection[str] = ()
) -> tuple[str, ...]:
    """The lines that turn ``old`` (as ``files`` say it) into ``new``; none where the framework's renderer cannot write
    one of the two.  ``lacking`` are settings that plans have, the files have not, and the change does not ask for."""
    return tuple(_changes(request, files, old, new, lacking))


def _changes(
    request: Request, files: Mapping[str, str], old: Strategy, new: Plan, lacking: Collection[str]
) -> Iterator[str]:
    from planner.render import plan_settings

    earlier = new.model_copy(update={"strategy": old})
    try:
        before = plan_settings(_document(request, earlier), earlier)
        after = plan_settings(_document(request, new), new)
    except PlannerError:
        return
    for place, setting in after.items():
        told = before.get(place)
        # Constants of a module matter to those who have the module; a rendered one holds what others write in code.
        known = not setting.file.endswith(".py") or setting.file in files
        asked = not any(setting.name in other.split() for other in lacking)
        if known and asked and (told is None or told.text != setting.text):
            yield setting.text
    texts = "\n".join(files.values())
    for place, setting in before.items():
        if place not in after and setting.name.rpartition(".")[2] in texts:
            yield f"{LEAVE_OUT}{setting.name}"


def _document(request: Request, plan: Plan) -> PlanDocument:
    """The plan for the job in its own number format."""
    job = request.job.model_copy(update={"precision": plan.strategy.precision})
    asked = request.model_copy(update={"job": job})
    return make_document(asked, plan, SearchReport(status="estimated"), identity=strategy_id(asked, plan))
