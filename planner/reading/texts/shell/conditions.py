"""Outcomes of a script's tests where no variable is set that the script does not set itself.

None where an outcome cannot be known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from planner.reading.texts.shell.expansion import integer_value
from planner.reading.texts.shell.words import UNKNOWN, unknown_names

Status = bool | None
"""Whether a command succeeded; None where that is not known."""


def beyond_knowledge(text: str) -> bool:
    """Whether an argument of the script or the output of a command stands in it; a variable that nobody sets is
    empty."""
    return any(re.fullmatch(r"\d+|\{\d+\}|\(.*", name, re.S) for name in unknown_names(text))


def combined(first: Status, second: Status, joined: str) -> Status:
    """The outcome of two commands with ``&&``, ``||`` or nothing between them."""
    if joined == "&&":
        return first is True and second is True
    if joined == "||":
        return first is True or second is True
    return second


_UNARY = ("-n", "-z", "-f", "-d", "-e", "-s", "-r", "-w", "-x", "-v")
_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def tested(parts: list[str]) -> Status:
    """A test's outcome where no variable is set that the script does not set itself."""
    for joiner in ("||", "&&"):
        if joiner in parts:
            place = parts.index(joiner)
            return combined(tested(parts[:place]), tested(parts[place + 1 :]), joiner)
    if parts[:1] == ["!"]:
        inner = tested(parts[1:])
        return None if inner is None else not inner
    if len(parts) == 2 and parts[0] in _UNARY:
        text = UNKNOWN.sub("", parts[1])
        # Files of the machine it runs on are not looked for.
        return {"-n": text != "", "-z": text == ""}.get(parts[0], False)
    if len(parts) == 1:
        return UNKNOWN.sub("", parts[0]) != ""
    return _compared(parts) if len(parts) == 3 else None


def _compared(parts: list[str]) -> Status:
    left, sign, right = UNKNOWN.sub("", parts[0]), parts[1], UNKNOWN.sub("", parts[2])
    if sign in ("=", "=="):
        return left == right
    if sign == "!=":
        return left != right
    if sign in _NUMERIC:
        one, other = integer_value(left or "0"), integer_value(right or "0")
        return None if one is None or other is None else _NUMERIC[sign](one, other)
    return None
