"""What a raw word becomes: variables, defaults, arrays, arithmetic and quotes, with a mark where a value is not known.

Anything beyond them stays a mark with its own text as the name."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.errors import InputError
from planner.reading.texts.shell.tokens import PAIRS, opener, raw_tokens, span
from planner.reading.texts.shell.words import NAME, Word, marked, unknown_names

if TYPE_CHECKING:
    from planner.reading.texts.shell.script import Machine

MAX_DEPTH = 40
"""Nested expansions, sourced files and blocks; a script that goes deeper refers to itself."""


class Expansion:
    """One raw word on its way to the words that it becomes."""

    def __init__(self, machine: Machine, file: str, line: int, depth: int, *, split: bool = True) -> None:
        self.machine, self.file, self.line, self.depth, self.split = machine, file, line, depth, split
        self.found: list[Word] = []
        self.current: str | None = None
        self.place = f"{file}:{line}"

    def words(self, raw: str) -> list[Word]:
        self._part(raw, quoted=False)
        self._close()
        return self.found

    def _add(self, text: str, place: str = "") -> None:
        if not self.current and place:
            self.place = place
        self.current = (self.current or "") + text

    def _close(self) -> None:
        if self.current is not None:
            self.found.append(Word(self.current, self.place, unknown_names(self.current)))
        self.current, self.place = None, f"{self.file}:{self.line}"

    def _part(self, raw: str, *, quoted: bool) -> None:
        index = 0
        while index < len(raw):
            char = raw[index]
            if char == "\\" and index + 1 < len(raw):
                after = raw[index + 1]
                if after != "\n":
                    self._add(after if not quoted or after in '$`"\\' else char + after)
                index += 2
            elif char == "'" and not quoted:
                end = span(raw, index, self.place)
                self._add(raw[index + 1 : end - 1])
                index = end
            elif char == '"':
                end = span(raw, index, self.place)
                self._add("")
                self._part(raw[index + 1 : end - 1], quoted=True)
                index = end
            elif char in "$`":
                index = self._dollar(raw, index, quoted)
            else:
                self._add(char)
                index += 1

    def _dollar(self, raw: str, index: int, quoted: bool) -> int:
        start = opener(raw, index)
        if start in ("$((", "$(", "`", "${"):
            end = span(raw, index, self.place)
            inside = raw[index + len(start) : end - len(PAIRS[start])]
            if start == "$((":
                self._value([Word(self._arithmetic(inside), "")], quoted)
            elif start == "${":
                self._parameter(inside, quoted)
            else:
                self._substituted(inside, quoted)
            return end
        name = NAME.match(raw, index + 1)
        if name:
            self._parameter(name.group(), quoted)
            return name.end()
        special = raw[index + 1 : index + 2]
        if special and (special in "@*" or special.isdigit()):
            self._parameter(special, quoted)
            return index + 2
        if special and special in "#?$!-":
            self._add(marked(special))
            return index + 2
        self._add(raw[index])
        return index + 1

    def _substituted(self, inside: str, quoted: bool) -> None:
        """``$(cat <<EOF ...)`` is the text that follows; what another command prints is not known."""
        if re.match(r"\s*cat\s*<<-?[^<]", inside):
            found = [token for token in raw_tokens(inside, self.file, self.line) if token.stream == "document"]
            self._value([self.machine.here(found[0], self.file)], quoted)
        else:
            self._add(marked(f"({inside.strip()[:60]})"))

    def _arithmetic(self, text: str) -> str:
        inner = Expansion(self.machine, self.file, self.line, self.depth + 1, split=False).words(text)
        plain = " ".join(word.text for word in inner)
        plain = NAME.sub(lambda found: self._number(found.group()), plain) if not unknown_names(plain) else plain
        value = None if unknown_names(plain) else integer_value(plain)
        return str(value) if value is not None else marked(f"(({text.strip()[:60]}))")

    def _number(self, name: str) -> str:
        value = self.machine.variables.get(name)
        return value[0].text if value and value[0].text else marked(name)

    def _parameter(self, inside: str, quoted: bool) -> None:
        found = re.match(r"(!?)([A-Za-z_]\w*|\d+|[@*#?])(\[[^]]*\])?", inside, re.ASCII)
        if not found or found[1] or inside.startswith("#"):
            self._add(marked("{" + inside[:60] + "}"))
            return
        name, index, rest = found[2], found[3] or "", inside[found.end() :]
        if name in "@*":
            # The words that the caller of a script adds are not known, and usually none.
            first = int(sliced[1]) if (sliced := re.match(r":(\d{1,4})$", rest)) else 1
            self._value(self.machine.variables.get("@", [])[max(first - 1, 0) :], quoted, array=True)
            return
        value = self._indexed(self.machine.variables.get(name), index)
        operation = re.match(r":?[-=?+]", rest)
        if operation:
            self._defaulted(name, value, operation.group(), rest[operation.end() :], quoted)
        elif rest:
            self._add(marked("{" + inside[:60] + "}"))
        elif value is None:
            self._unknown(name, index)
        else:
            self._value(value, quoted, array=index in ("[@]", "[*]"))

    def _unknown(self, name: str, index: str) -> None:
        if self.machine.unsourced:
            self.machine.script.doubtful.add(name)
        if index in ("[@]", "[*]") and name not in self.machine.script.doubtful:
            # An array that nobody fills adds no words.
            if self.current == "":
                self.current = None
            return
        self._add(marked(f"{{{name}}}" if name.isdigit() and len(name) > 1 else name))

    def _indexed(self, value: list[Word] | None, index: str) -> list[Word] | None:
        if value is None or index in ("[@]", "[*]"):
            return value
        position = int(index[1:-1]) if re.fullmatch(r"\[\d+\]", index) else 0
        return value[position : position + 1]

    def _defaulted(self, name: str, value: list[Word] | None, operation: str, text: str, quoted: bool) -> None:
        """``${NAME:-text}`` and its relatives; a variable without a value takes the text."""
        empty = value is None or (":" in operation and not any(word.text for word in value))
        if operation.endswith("+"):
            if not empty:
                self._deeper(text, quoted)
        elif not empty:
            self._value(value or [], quoted)
        elif operation.endswith("?"):
            self._add(marked(name))
        else:
            if self.depth > MAX_DEPTH:
                raise InputError(
                    "expansions are nested too deeply",
                    where=self.place,
                    got=text[:40],
                    hint="name the part of the script that starts the training",
                )
            self._deeper(text, quoted)
            if operation.endswith("="):
                inner = self.machine.joined(text, self.file, self.line, self.depth + 1)
                self.machine.variables[name] = [inner]

    def _deeper(self, text: str, quoted: bool) -> None:
        inner = Expansion(self.machine, self.file, self.line, self.depth + 1, split=self.split and not quoted)
        self._value(inner.words(text), quoted=True)

    def _value(self, words: list[Word], quoted: bool, *, array: bool = False) -> None:
        """Adds the words of a variable: each its own where an array is spread, split at spaces where not quoted."""
        if array and self.split:
            for position, word in enumerate(words):
                if position:
                    self._close()
                self._fields(word, quoted)
            if not words and self.current == "":
                self.current = None
            return
        for position, word in enumerate(words[: None if array or quoted else 1]):
            if position:
                self._add(" ") if not self.split else self._close()
            self._fields(word, quoted)

    def _fields(self, word: Word, quoted: bool) -> None:
        if quoted or not self.split:
            self._add(word.text, word.where)
            return
        pieces = re.split(r"[ \t\n]+", word.text)
        for position, piece in enumerate(pieces):
            if position:
                self._close()
            if piece:
                self._add(piece, word.where)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def integer_value(text: str) -> int | None:
    """The value of a shell arithmetic expression of numbers; None where it is none or anything else than
    ``+ - * / %`` stands in it."""
    if len(text) > 200:
        return None
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluated(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    else:
        raise ValueError("no plain arithmetic")
    if abs(value) > 10**18:
        raise ValueError("too large")
    return value
