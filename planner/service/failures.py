"""Turns searches without a plan into the error that says why, what came nearest and what would work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from planner.backends import get_backend
from planner.errors import InfeasibleError, TimeLimitError
from planner.service.profiles import context_of
from planner.specs.convert import to_strategy
from planner.specs.plan import PlanDocument, Request

if TYPE_CHECKING:
    from planner.search.outcome import InfeasibleReport, NearestMiss, Outcome, Relaxation


class Interrupted(Exception):  # noqa: N818 - not an error: it carries the answer found so far
    """The user stopped the search; ``document`` is the best that was found until then."""

    def __init__(self, document: PlanDocument) -> None:
        super().__init__("interrupted")
        self.document = document


def out_of_time(names: Iterable[str]) -> TimeLimitError:
    """The error that the search (of these frameworks) was cut short, and none has a plan."""
    searched = ", ".join(names)
    return TimeLimitError(
        "the time limit ended the search before a plan was found" + (f" ({searched})" if searched else ""),
        hint="raise --time-limit, or narrow the search with --backend and --pin",
    )


def nothing_found(request: Request, outcomes: Mapping[str, Outcome]) -> InfeasibleError:
    """The error that nothing fits, with the reasons."""
    cluster = request.cluster
    reports = {name: outcome.infeasible for name, outcome in outcomes.items() if outcome.infeasible is not None}
    changes = _least_changes(change for report in reports.values() for change in report.relaxations)
    details: dict[str, Any] = {
        "rejected": {name: _by_count(outcome.rejected) for name, outcome in outcomes.items()},
        "nearest": {
            name: _miss(request, name, report.nearest) for name, report in reports.items() if report.nearest is not None
        },
        "relaxations": changes,
    }
    reasons = {name: _reasons(name, outcome.rejected) for name, outcome in outcomes.items()}
    details["reasons"] = {name: found for name, found in reasons.items() if found}
    nearest = any(DOES_NOT_FIT in outcome.rejected for outcome in outcomes.values())
    names = ", ".join(outcomes)
    refused = f"no strategy of {names} fits" if nearest else f"the rules of {names} leave no strategy for"
    pinned = f" with {', '.join(f'{name}={value}' for name, value in request.pins.items())}" if request.pins else ""
    return InfeasibleError(
        f"{refused} {request.model.name} on {cluster.gpus} x {cluster.accelerator.id}{pinned}",
        details=details,
        hint=next(iter(changes), _without_a_change(reports.values(), {} if nearest else reasons)),
        complete=all(report.complete for report in reports.values()),
    )


def _without_a_change(reports: Collection[InfeasibleReport], reasons: Mapping[str, Mapping[str, str]]) -> str:
    """What to do where no change is known that helps; ``reasons`` where rules refuse every candidate."""
    tried, lacking = TRIED_FOR_ROOM, "change what the nearest miss lacks"
    if reasons:
        # Of each framework what refuses the most.
        first = dict.fromkeys(next(iter(sentences.values()), "") for sentences in reasons.values())
        tried, lacking = TRIED_FOR_RULES, " ".join(["change what these rules speak of.", *filter(None, first)])
    complete = all(report.complete for report in reports)
    return f"{NOTHING_TRIED_HELPS} ({tried}): {lacking}" if complete else f"{TOO_LITTLE_TIME}, or {lacking}"


DOES_NOT_FIT = "does-not-fit"
"""What the search counts candidates under that no rule refuses, but the memory."""
NOTHING_TRIED_HELPS = "no single change that was tried helps"
TRIED_FOR_ROOM = "each pin left open, another framework, more GPUs, shorter sequences"
TRIED_FOR_RULES = "each pin left open, another loss, number format, framework or size"
TOO_LITTLE_TIME = "the time limit ended the search for changes that help: raise --time-limit to be told one"


def _reasons(name: str, rejected: Mapping[str, int]) -> dict[str, str]:
    """The sentences of the rules that refused candidates, the most frequent first."""
    sentences = {rule.id: rule.reason for rule in get_backend(name).rules}
    return {rule: sentences[rule] for rule in _by_count(rejected) if rule in sentences}


LEAST = {"gpus": min, "seq_len": max}
"""Of several frameworks' values for one of these only the one nearest to the question is told."""


def _least_changes(changes: Iterable[Relaxation]) -> list[str]:
    """Sentences, each once; of several frameworks' numbers of GPUs or sequence lengths only the least change."""
    kept: dict[str, Relaxation] = {}
    for change in changes:
        better = LEAST.get(change.field)
        key = change.text if better is None else change.field
        if key not in kept or (
            better is not None and int(change.value) == better(map(int, (change.value, kept[key].value)))
        ):
            kept[key] = change
    return [change.text for change in kept.values()]


def _by_count(rejected: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(rejected.items(), key=lambda item: -item[1]))


def _miss(request: Request, name: str, miss: NearestMiss) -> dict[str, Any]:
    context = context_of(request, name)
    strategy = to_strategy(miss.batch, 0, context.recompute_kinds, request.job)
    degrees = {name: getattr(strategy, name) for name in ("tp", "cp", "pp", "ep", "dp")}
    return {
        "where": miss.where,
        "needed_bytes": miss.needed_bytes,
        "limit_bytes": miss.limit_bytes,
        "excess_bytes": miss.excess_bytes,
        "strategy": {
            **{name: value for name, value in degrees.items() if value > 1},
            "zero_stage": strategy.zero_stage,
        },
    }
