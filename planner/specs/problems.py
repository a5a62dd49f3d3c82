"""What is wrong with a value from outside, in our words: the first complaint of a spec as an error a user can act on.

Shared by everything that reads files: models, clusters, plans, measured runs and machine profiles."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from planner.errors import InputError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


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


def named_in(text: str, names: Iterable[str]) -> list[str]:
    """Those of the names that a sentence holds, in its order."""
    known = set(names)
    return list(dict.fromkeys(word for word in re.findall(r"\w+", text) if word in known))


def input_error(problem: ValidationError, where: str, known: Mapping[str, FieldInfo] | None = None) -> InputError:
    """The first complaint of pydantic in our words, or all fields that are missing; ``known`` are those of the
    outermost level."""
    errors = problem.errors(include_url=False)
    first = errors[0]
    if first["type"] == "missing":
        return _missing([error for error in errors if error["type"] == "missing"], where, known or {})
    if first["type"] == "extra_forbidden":
        return _unknown(first, where, (known or {}) if len(first["loc"]) == 1 else {})
    message = _MESSAGES.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    got = None if isinstance(first.get("input"), Mapping) else shown(first.get("input"))
    allowed = _TYPES.get(first["type"].removesuffix("_type")) or _limit(message) or first.get("ctx", {}).get("expected")
    fields = _fields_of(first, message, known or {})
    hint = f"{fields[0]} must be {allowed}" if allowed and fields else f"change {' or '.join(fields or ['its values'])}"
    return InputError(
        message[:1].lower() + message[1:], where=_place(where, fields), got=got, allowed=allowed, hint=hint
    )


def _place(where: str, fields: Iterable[str]) -> str:
    return ": ".join(part for part in (where, ", ".join(fields)) if part)


def _dotted(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"])


def _fields_of(error: ErrorDetails, message: str, known: Iterable[str]) -> list[str]:
    """The fields that a complaint is about; one about several at once names them in its sentence."""
    place = _dotted(error)
    if error["type"] != "value_error":
        return [place] if place else []
    named = named_in(message, known) if not place else re.findall(r"([a-z_]+)\(", message)
    return [".".join(part for part in (place, name) if part) for name in named] or ([place] if place else [])


def _missing(errors: Sequence[ErrorDetails], where: str, known: Mapping[str, FieldInfo]) -> InputError:
    fields = [_dotted(error) for error in errors]
    needed = [name for name, field in known.items() if field.is_required()]
    allowed = f"required: {', '.join(needed)}; optional: {', '.join(sorted({*known} - {*needed}))}" if known else None
    return InputError(
        "these fields are missing" if fields[1:] else "this field is missing",
        where=_place(where, fields),
        allowed=allowed,
        hint=f"add {', '.join(fields)}, or check the file",
    )


def _unknown(error: ErrorDetails, where: str, known: Iterable[str]) -> InputError:
    field, names = _dotted(error), sorted(known)
    near = difflib.get_close_matches(field.rsplit(".", 1)[-1], names, n=1)
    return InputError(
        "this field does not exist",
        where=_place(where, [field]),
        got=shown(error.get("input")),
        allowed=", ".join(names) or None,
        hint=f"did you mean {near[0]}?" if near else "remove the field",
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
