"""What is wrong with a value from outside, in our words: the first complaint of a spec as an error a user can act on.

Shared by everything that reads files: models, clusters, plans, measured runs and machine profiles."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from planner.errors import InputError


def shown(value: object) -> str:
    """A value as an error message may print it: escaped and short."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unreadable(problem: Exception, where: str, path: object) -> InputError:
    """The error that a file cannot be read, with the system's reason."""
    reason = getattr(problem, "strerror", None) or str(problem)
    return InputError(
        f"the file cannot be read: {reason}", where=where, got=shown(str(path)), hint="check path and permissions"
    )


def input_error(problem: ValidationError, where: str, known: Iterable[str] = ()) -> InputError:
    """The first complaint of pydantic in our words; an unknown key names the nearest known one."""
    first = problem.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    place = ": ".join(part for part in (where, field) if part)
    # The names are those of the outermost level.
    names = sorted(known) if len(first["loc"]) == 1 else []
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field.rsplit(".", 1)[-1], names, n=1)
        return InputError(
            "this field does not exist",
            where=place,
            got=shown(first.get("input")),
            allowed=", ".join(names) or None,
            hint=f"did you mean {near[0]}?" if near else "remove the field",
        )
    if first["type"] == "missing":
        return InputError(
            "this field is missing",
            where=place,
            allowed=", ".join(names) or None,
            hint=f"add {field}, or check the file",
        )
    message = _MESSAGES.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    got = None if isinstance(first.get("input"), Mapping) else shown(first.get("input"))
    return InputError(
        message[:1].lower() + message[1:],
        where=place,
        got=got,
        allowed=_TYPES.get(first["type"].removesuffix("_type")) or _limit(message),
        hint=f"correct {field or where}",
    )


def _limit(message: str) -> str | None:
    """What a complaint about a size allows, in its own words."""
    _, found, limit = message.partition(" should ")
    limit = limit.removeprefix("be ").removeprefix("have ")
    return limit if found and limit.startswith(("greater than ", "less than ", "at least ", "at most ")) else None


_MESSAGES = {
    "model_type": "this must hold named values",
    "dict_type": "this must hold named values",
    "tuple_type": "this must be a list",
    "list_type": "this must be a list",
}
"""What pydantic says in the words of its own classes."""
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text (in quotes where YAML would read a number or a date)",
    "bool": "true or false",
    "finite_number": "a finite number",
    "model": "an object with named values",
    "dict": "an object with named values",
    "tuple": "a list",
    "list": "a list",
}
"""What pydantic's type errors ask for."""
