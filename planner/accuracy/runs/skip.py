"""Why a record cannot be evaluated: a short reason that the report counts."""

from __future__ import annotations


class Skip(Exception):  # noqa: N818  (a reason to go on, not an error)
    """The record cannot be priced; the message is the reason, the same for all records of its kind."""

    @property
    def reason(self) -> str:
        return str(self)
