"""Whose limit of time a search met, and what is told of it: the request's own, or the service's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import InputError, TimeLimitError
from planner.search.outcome import Outcome
from planner.service import searching
from planner.specs.plan import Request
from planner_api.problems import Problem
from planner_api.solving import tasks

NOTHING_FITS = {"model": "405b", "cluster": {"gpu": "h100", "gpus": 8}, "backend": "fsdp"}
REFUSED = {"model": "8b", "cluster": {"gpu": "h100", "gpus": 16}, "job": {"loss": "chunked"}}


def solved(body: dict[str, Any], limit_s: float) -> tuple[tasks.Solved, Problem]:
    """How a search ends in this process, with its problem."""
    found = tasks.solve("0" * 64, json.dumps({"body": body, "profile": None}), limit_s)
    assert found.problem is not None
    return found, Problem.model_validate_json(found.problem)


@pytest.mark.parametrize(
    ("own_s", "limit_s", "named", "cut_at_s"),
    [
        (None, 0.01, "PLANNER_SOLVE_TIME_LIMIT_S", 0.01),
        (100.0, 0.01, "PLANNER_SOLVE_TIME_LIMIT_S", 0.01),
        (0.01, 100.0, "time_limit_s", None),
    ],
)
def test_the_shorter_limit_is_named(own_s: float | None, limit_s: float, named: str, cut_at_s: float | None) -> None:
    """An explanation that the service's limit cut short is made anew under a larger one; the request's own stays."""
    found, told = solved({**NOTHING_FITS, "time_limit_s": own_s}, limit_s)
    assert (found.outcome, found.cut_at_s) == ("infeasible", cut_at_s)
    assert f"raise {'the service' if cut_at_s else 'time_limit_s'}" in str(told.hint)
    assert named in str(told.hint)


def test_an_explanation_that_had_its_time_stays() -> None:
    found, told = solved(REFUSED, 60.0)
    assert (found.outcome, found.cut_at_s) == ("infeasible", None)
    assert told.hint == "leave the loss to the framework: a plan fits with job.loss auto"
    assert told.details is not None
    assert any("torchtitan" in change for change in told.details["relaxations"])
    assert "fits" not in told.detail


@pytest.mark.parametrize("explained", [False, True])
def test_what_was_not_searched_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch, *, explained: bool) -> None:
    """One framework that refuses the pins, and one that had no time: nobody knows; where only the explanation had none,
    the answer stands without it."""

    def search(request: Request, name: str, *given: Any, explain: bool, **named: Any) -> Outcome:
        if explained and not explain:
            return Outcome("infeasible", None, rejected={"does-not-fit": 3})
        if name == "megatron":
            raise InputError("tp=2 is not possible: why", where="pins.tp")
        raise TimeLimitError("no plan was found within 1 s")

    monkeypatch.setattr(searching, "_search", search)
    body = {**NOTHING_FITS, "backend": "fsdp" if explained else "auto"}
    found, told = solved(body, 10.0)
    assert (found.outcome, found.cut_at_s) == ("infeasible" if explained else "time-limit", 10.0)
    assert "PLANNER_SOLVE_TIME_LIMIT_S" in str(told.hint)
