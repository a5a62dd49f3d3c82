"""Failures of the database that pass by themselves or by an operator's hand: what they are, and how they are told."""

from __future__ import annotations

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionError

from planner_api.problems import ProblemError

FAILURES = (OperationalError, InterfaceError, InternalError, NoConnectionError)
"""The database cannot be reached, or cannot write now: its disk is full, or it is the standby of another."""
AWAY = (*FAILURES, OSError)
"""The same, from where nothing but the database is asked."""
_FULL = ("database or disk is full", "disk I/O error", "no space left", "could not extend file")


def reason(problem: BaseException) -> str:
    """The driver's own words, in one line, for the log."""
    return str(getattr(problem, "orig", None) or problem).strip().split("\n")[0]


def unable(problem: BaseException) -> ProblemError:
    """The answer to a request that met such a failure; addresses and users stay in the log."""
    full = any(words.lower() in reason(problem).lower() for words in _FULL)
    return ProblemError(
        "not-able",
        "the database cannot write: its disk may be full" if full else "the database does not answer",
        hint="ask again a little later; if it stays, tell whoever runs the service, whose log has the cause",
        headers={"Retry-After": "5"},
    )
