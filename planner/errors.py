"""Every error a user can meet: one class a cause, each with a stable code and the exit code that the command line
returns.

PlannerError
|-- InputError          2  a name, number, file or flag cannot be used as given
|-- InfeasibleError     3  the question is valid and no plan fits it
|-- TimeLimitError      4  the time limit ended the search before a plan was found
|-- MeasurementError    5  a measurement on this machine was started and failed
`-- MissingExtraError   6  an optional dependency or a device is not there

An error says where, what was given, what is allowed, and ends in a hint that works when followed.
"""

from __future__ import annotations

from typing import Any


class PlannerError(Exception):
    """Base of all expected errors; anything else that escapes is a bug of the planner (exit code 1)."""

    code = "planner-error"
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        got: str | None = None,
        allowed: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.got = got
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}" if self.where else self.message]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.allowed is not None:
            lines.append(f"  allowed: {self.allowed}")
        if self.hint is not None:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The error as the JSON document that ``--json`` prints (absent parts are left out)."""
        parts = {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "got": self.got,
            "allowed": self.allowed,
            "hint": self.hint,
        }
        return {"error": {name: value for name, value in parts.items() if value is not None}}


class InputError(PlannerError):
    """A name, number, file or flag cannot be used as given."""

    code = "bad-input"
    exit_code = 2


class InfeasibleError(PlannerError):
    """The question is valid and no plan fits it; ``details`` holds the counted reasons and the nearest miss.

    ``complete`` is false where the time limit ended the search for changes that help."""

    code = "no-plan-fits"
    exit_code = 3

    def __init__(
        self, message: str, *, details: dict[str, Any] | None = None, hint: str | None = None, complete: bool = True
    ) -> None:
        super().__init__(message, hint=hint)
        self.details = details or {}
        self.complete = complete

    def to_dict(self) -> dict[str, Any]:
        document = super().to_dict()
        document["error"]["details"] = self.details
        return document


class TimeLimitError(PlannerError):
    """The time limit ended the search before any plan was found."""

    code = "time-limit"
    exit_code = 4


class MeasurementError(PlannerError):
    """A measurement on this machine was started and failed."""

    code = "measurement-failed"
    exit_code = 5


class MissingExtraError(PlannerError):
    """An optional dependency or a device that the command needs is not there."""

    code = "missing-extra"
    exit_code = 6
