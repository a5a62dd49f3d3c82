"""Words and commands of a script, and what is not known of them: the mark of a variable without a value.

Marks are private-use characters, so that a name's spaces, quotes and bars mean nothing to the shell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around the name of a variable without a value, inside of texts (private-use characters, which no script holds)."""
_VEIL = 0xF0000
"""Added to the characters of such a name, so that its spaces, quotes and bars mean nothing to the shell."""
UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Word:
    """One word after expansion."""

    text: str
    """With ``$NAME`` where a variable has no value."""
    where: str
    """``file:line`` of the place that wrote it."""
    unset: tuple[str, ...] = ()
    """Variables (or ``$(...)``) whose value is not known."""


@dataclass(frozen=True)
class Command:
    """A simple command as it would be started."""

    words: tuple[Word, ...]
    environment: Mapping[str, str]
    """Exported variables and those written before the command; ``$NAME`` stands for what is not known."""


def shown(text: str) -> str:
    """``text`` with ``$NAME`` where a value is not known."""
    return UNKNOWN.sub(lambda found: "$" + _name(found[1]), text)


def unknown_names(text: str) -> tuple[str, ...]:
    """The variables and commands whose values are missing in ``text``."""
    return tuple(dict.fromkeys(map(_name, UNKNOWN.findall(text))))


def marked(name: str) -> str:
    """The mark of an unknown value; marks inside of ``name`` are written out."""
    return _OPEN + "".join(chr(_VEIL + ord(char)) for char in shown(name) if ord(char) < _VEIL) + _CLOSE


def _name(mark: str) -> str:
    return "".join(chr(ord(char) - _VEIL) if ord(char) >= _VEIL else char for char in mark)
