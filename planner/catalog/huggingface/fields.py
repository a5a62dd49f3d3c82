"""Typed access to a configuration somebody else wrote: every wrong value is an error that names file and field.

A key that is present with null counts as absent, except where a family tells the two apart.
"""

from __future__ import annotations

import math
from typing import Any

from planner.errors import InputError

_LARGEST = 1_000_000_000
"""No dimension of a model comes near this; a larger number is a slip or an attack."""


class Fields:
    """A JSON object with the file (and outer field) it came from."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def fail(self, field: str, message: str, *, allowed: str | None = None, hint: str | None = None) -> InputError:
        """The error for one field (to be raised by the caller); ``message`` is what the sentence says of it."""
        got = None if field not in self.data else _short(self.data[field])
        return InputError(
            f"{field} {message}",
            where=f"{self.where}: {field}",
            got=got,
            allowed=allowed,
            hint=hint or f"write {field} as the checkpoint's own config.json does",
        )

    def first(self, *names: str) -> str | None:
        """The first of the names that is there and not null."""
        return next((name for name in names if self.data.get(name) is not None), None)

    def integer(self, *names: str, minimum: int = 0, maximum: int = _LARGEST) -> int | None:
        """A whole number under the first name that is set; None when none is."""
        name = self.first(*names)
        if name is None:
            return None
        value = self.data[name]
        whole = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value.is_integer())
        if isinstance(value, bool) or not whole or not minimum <= value <= maximum:
            raise self.fail(name, "is not a usable number", allowed=f"a whole number from {minimum} to {maximum}")
        return int(value)

    def required(self, *names: str, maximum: int = _LARGEST) -> int:
        """A positive whole number that must be there."""
        value = self.integer(*names, minimum=1, maximum=maximum)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise InputError(
                f"the field {names[0]}{others} is missing",
                where=f"{self.where}: {names[0]}",
                hint="give the config.json of the checkpoint, or a catalogue name that `planner models` lists",
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(name, "is not a usable number", allowed="a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "is not a truth value", allowed="true or false")
        return value

    def text(self, *names: str) -> str | None:
        """A string."""
        name = self.first(*names)
        if name is None:
            return None
        value = self.data[name]
        if not isinstance(value, str):
            raise self.fail(name, "is not a text", allowed="a string")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.fail(name, "is not a list", allowed="a list")
        return value

    def nested(self, name: str) -> Fields | None:
        """An object inside this one."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "is not an object", allowed="a JSON object")
        return Fields(value, f"{self.where}: {name}")

    def with_defaults(self, defaults: dict[str, Any]) -> Fields:
        """The same with values for keys that are not there at all."""
        return Fields({**defaults, **self.data}, self.where)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
