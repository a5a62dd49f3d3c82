"""JSON as people write it, with the place of every value and every departure from the standard.

Comments, commas too many or too few, single quotes, bare keys, Python's True, NaN, repeated keys and a byte order mark
are read and listed; what a framework makes of each of them is for its own reader to say.  Written out here because the
libraries for it (json5, commentjson, hjson) return bare values: the line of a key and what was forgiven are lost, and
those are what an author has to be told.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.errors import InputError

Kind = Literal[
    "byte-order-mark",
    "comment",
    "trailing-comma",
    "missing-comma",
    "single-quotes",
    "bare-key",
    "python-literal",
    "not-a-number",
    "repeated-key",
]

Path = tuple[str | int, ...]
"""Keys and list positions from the root to a value."""

MAX_DEPTH = 60
"""Nesting that no configuration needs; deeper text is refused instead of exhausting the interpreter's stack."""
MAX_DIGITS = 400
"""Digits of a number; Python itself refuses to convert thousands."""

_SPACE = re.compile(r"[ \t\r\n\f\v\u00a0]+|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.+-])")
_DOUBLE = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_WORD = re.compile(r"-?[A-Za-z_$][\w$-]*")

_STANDARD = {"true": True, "false": False, "null": None}
_PYTHON = {"True": True, "False": False, "None": None}
_NOT_NUMBERS = {
    "NaN": float("nan"),
    "nan": float("nan"),
    "Infinity": float("inf"),
    "inf": float("inf"),
    "-Infinity": float("-inf"),
    "-inf": float("-inf"),
}


@dataclass(frozen=True)
class Place:
    """Where something stands; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Departure:
    """One thing in the text that standard JSON does not allow."""

    kind: Kind
    place: Place
    text: str
    """What stands there."""


@dataclass(frozen=True)
class LenientDocument:
    """The parsed text."""

    value: Any
    places: Mapping[Path, Place]
    """Place of every key, and of every element of a list; the root is ``()``."""
    departures: tuple[Departure, ...]

    def place(self, path: Path) -> Place | None:
        """Where ``path`` stands, or the nearest part of it that the text has."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None


def parse_lenient(text: str, *, where: str) -> LenientDocument:
    """Parse ``text``; ``where`` names the file in errors.

    Raises InputError with line and column where the text is not JSON even when read kindly.
    """
    parser = _Parser(text, where)
    value = parser.document()
    return LenientDocument(value, parser.places, tuple(parser.departures))


@dataclass
class _Parser:
    """Recursive descent over one text; ``at`` is the next character."""

    text: str
    where: str
    at: int = 0
    places: dict[Path, Place] = field(default_factory=dict)
    departures: list[Departure] = field(default_factory=list)
    line_starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", self.text))]

    def document(self) -> Any:
        if self.text.startswith("\ufeff"):
            self._depart("byte-order-mark", 0, 1)
            self.at = 1
        self._space()
        self.places[()] = self._place(self.at)
        value = self._value((), 0)
        self._space()
        if self.at < len(self.text):
            raise self._error("something follows the end of the JSON value")
        return value

    def _value(self, path: Path, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._error(f"values are nested more than {MAX_DEPTH} deep")
        head = self.text[self.at : self.at + 1]
        if head == "{":
            return self._object(path, depth)
        if head == "[":
            return self._list(path, depth)
        if head in ('"', "'"):
            return self._string()
        number = _NUMBER.match(self.text, self.at)
        if number:
            return self._number(number)
        return self._word()

    def _object(self, path: Path, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self.at += 1
        while not self._closes("}"):
            start = self.at
            key = self._key()
            if key in result:
                self._depart("repeated-key", start, self.at)
            self.places[(*path, key)] = self._place(start)
            self._space()
            if self.text[self.at : self.at + 1] != ":":
                raise self._error(f"a colon is missing after the key {key[:40]!r}")
            self.at += 1
            self._space()
            result[key] = self._value((*path, key), depth + 1)
            self._separator("}")
        return result

    def _list(self, path: Path, depth: int) -> list[Any]:
        result: list[Any] = []
        self.at += 1
        while not self._closes("]"):
            self.places[(*path, len(result))] = self._place(self.at)
            result.append(self._value((*path, len(result)), depth + 1))
            self._separator("]")
        return result

    def _closes(self, bracket: str) -> bool:
        self._space()
        if self.text.startswith(bracket, self.at):
            self.at += 1
            return True
        if self.at >= len(self.text):
            raise self._error(f"the text ends before the closing {bracket!r}")
        return False

    def _separator(self, bracket: str) -> None:
        """The comma after an element, unless the bracket closes; a comma right before the bracket is a departure."""
        end = self.at
        self._space()
        if self.text.startswith(bracket, self.at):
            return
        if not self.text.startswith(",", self.at):
            if self.at >= len(self.text):
                raise self._error(f"the text ends before the closing {bracket!r}")
            if "\n" not in self.text[end : self.at]:
                raise self._error(f"a comma or {bracket!r} is missing")
            # Hjson lets the end of a line stand for the comma.
            self._depart("missing-comma", self.at, self.at + 1)
            return
        comma = self.at
        self.at += 1
        self._space()
        if self.text.startswith(bracket, self.at):
            self._depart("trailing-comma", comma, comma + 1)

    def _key(self) -> str:
        if self.text[self.at : self.at + 1] in ('"', "'"):
            return self._string()
        word = _WORD.match(self.text, self.at)
        if word is None:
            raise self._error("a key in quotation marks is missing")
        self._depart("bare-key", self.at, word.end())
        self.at = word.end()
        return word.group()

    def _string(self) -> str:
        single = self.text.startswith("'", self.at)
        match = (_SINGLE if single else _DOUBLE).match(self.text, self.at)
        if match is None:
            raise self._error("a string does not end on its line")
        body = match.group()
        if single:
            self._depart("single-quotes", self.at, match.end())
            inner = body[1:-1].replace("\\'", "'")
            body = '"' + re.sub(r'(?<!\\)"', r"\"", inner) + '"'
        try:
            value = json.loads(body, strict=False)
        except ValueError as error:
            raise self._error("a string holds an escape that JSON does not have") from error
        self.at = match.end()
        return str(value)

    def _number(self, match: re.Match[str]) -> int | float:
        token = match.group()
        if len(token) > MAX_DIGITS:
            raise self._error(f"a number has more than {MAX_DIGITS} digits")
        value = json.loads(token)
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            self._depart("not-a-number", self.at, match.end())
        self.at = match.end()
        return value  # type: ignore[no-any-return]  # json's number of a number

    def _word(self) -> Any:
        match = _WORD.match(self.text, self.at)
        word = match.group() if match else ""
        if word in _STANDARD:
            value: Any = _STANDARD[word]
        elif word in _PYTHON:
            value = _PYTHON[word]
            self._depart("python-literal", self.at, self.at + len(word))
        elif word in _NOT_NUMBERS:
            value = _NOT_NUMBERS[word]
            self._depart("not-a-number", self.at, self.at + len(word))
        else:
            raise self._error("this is no JSON value")
        self.at += len(word)
        return value

    def _space(self) -> None:
        while match := _SPACE.match(self.text, self.at):
            if match.group()[0] in "/#":
                self._depart("comment", match.start(), match.end())
            self.at = match.end()

    def _place(self, offset: int) -> Place:
        line = bisect_right(self.line_starts, offset)
        return Place(line, offset - self.line_starts[line - 1] + 1)

    def _depart(self, kind: Kind, start: int, end: int) -> None:
        self.departures.append(Departure(kind, self._place(start), self.text[start:end].strip()[:60]))

    def _error(self, message: str) -> InputError:
        place = self._place(self.at)
        rest = self.text[self.at : self.at + 40].split("\n")[0]
        return InputError(
            message,
            where=f"{self.where}:{place.line}:{place.column}",
            got=repr(rest) if rest else "the end of the line",
            allowed="JSON (comments and trailing commas are read too)",
            hint=f"look at line {place.line}, and at the line before it for a missing comma or quotation mark",
        )
