"""From a script's text to raw words and separators: quotes, comments, line ends, redirections and here-documents.

Nothing is expanded here; InputError where a quote, bracket or array is opened and never closed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.errors import InputError


@dataclass(frozen=True)
class Token:
    raw: str
    line: int
    operator: bool = False
    stream: Literal["", "document", "string", "into"] = ""
    """What a redirection gives the command (``<<``, ``<<<``) or where it writes (``>``); ``raw`` is its target."""
    lines: list[str] = field(default_factory=list)
    """Of a here-document."""


def span(text: str, start: int, where: str) -> int:
    """End of the quoted or substituted part that begins at ``start``."""
    stack = [closer(text, start)]
    index = start + len(opener(text, start))
    while stack:
        if index >= len(text):
            raise InputError(
                "a quote or bracket is opened and never closed",
                where=where,
                got=repr(text[start : start + 40]),
                allowed=f"a closing {stack[-1]!r}",
                hint="close it; `bash -n` finds the place",
            )
        closing, char = stack[-1], text[index]
        if text.startswith(closing, index):
            index += len(stack.pop())
        elif closing == "'":
            index += 1
        elif char == "\\":
            index += 2
        elif closer(text, index) and not (closing == '"' and char == "'"):
            stack.append(closer(text, index))
            index += len(opener(text, index))
        elif closing == ")" and char == "(":
            stack.append(")")
            index += 1
        else:
            index += 1
    return min(index, len(text))


def opener(text: str, index: int) -> str:
    """What opens a quoted or substituted part at ``index``; empty where nothing does."""
    return next((opener for opener in PAIRS if text.startswith(opener, index)), "")


def closer(text: str, index: int) -> str:
    """What closes the part that begins at ``index``."""
    return PAIRS.get(opener(text, index), "")


PAIRS = {"$((": "))", "$(": ")", "${": "}", "'": "'", '"': '"', "`": "`"}


_STREAMS: Mapping[str, Literal["document", "string", "into"]] = {
    "<<": "document",
    "<<-": "document",
    "<<<": "string",
    ">": "into",
    ">|": "into",
}


def raw_tokens(text: str, file: str, first_line: int = 1) -> list[Token]:
    """Raw words and separators, comments and here-documents left out."""
    return list(_Scanner(text, file, first_line).scan())


class _Scanner:
    def __init__(self, text: str, file: str, line: int) -> None:
        self.text, self.file, self.line = text, file, line
        self.index = 0
        self.heredocs: list[Token] = []
        self.conditional = False
        self.numbered = False
        """Whether a number stands before the redirection: it is not the standard stream."""

    def scan(self) -> Iterator[Token]:
        text = self.text
        while self.index < len(text):
            char = text[self.index]
            if char == "\n":
                yield Token("\n", self.line, True)
                self._advance(1)
                self._skip_heredocs()
            elif char in " \t\r":
                self.index += 1
            elif text.startswith("\\\n", self.index) or text.startswith("\\\r\n", self.index):
                self._advance(2 if text[self.index + 1] == "\n" else 3)
            elif char == "#":
                end = text.find("\n", self.index)
                self.index = len(text) if end < 0 else end
            elif not self.conditional and char in ";&|()<>":
                yield from self._operator()
            else:
                yield self._word()

    def _advance(self, count: int) -> str:
        part = self.text[self.index : self.index + count]
        self.line += part.count("\n")
        self.index += count
        return part

    def _operator(self) -> Iterator[Token]:
        text, line = self.text, self.line
        if text[self.index] in "<>" or text.startswith(("&>", "|&"), self.index):
            yield from self._redirection()
            return
        two = text[self.index : self.index + 2]
        yield Token(self._advance(2 if two in ("&&", "||", ";;") else 1), line, True)

    def _redirection(self) -> Iterator[Token]:
        """What goes into the command and out of it; a here-document follows at the end of the line."""
        mark = re.compile(r"<<<|<<-?|&>>?|\|&|[<>]&|>>|>\||<>|[<>]").match(self.text, self.index)
        self.index = mark.end() if mark else self.index + 1
        kind, numbered = mark.group() if mark else "", self.numbered
        self.numbered = False
        if kind == "|&":
            yield Token("|", self.line, True)
            return
        while self.index < len(self.text) and self.text[self.index] in " \t":
            self.index += 1
        if self.index < len(self.text) and self.text[self.index] not in "\n;&|":
            if self.text.startswith(("<(", ">("), self.index):
                self.index += 1
            if self.text[self.index] == "(":
                self._advance(span("$" + self.text[self.index :], 0, f"{self.file}:{self.line}") - 1)
                return
            target = self._word()
            if kind in _STREAMS:
                target = replace(target, stream=_STREAMS[kind])
            if target.stream == "document":
                self.heredocs.append(target)
            if target.stream and not numbered:
                yield target

    def _skip_heredocs(self) -> None:
        for token in self.heredocs:
            delimiter = token.raw.replace("'", "").replace('"', "").replace("\\", "")
            while self.index < len(self.text):
                end = self.text.find("\n", self.index)
                end = len(self.text) if end < 0 else end
                line = self.text[self.index : end]
                self._advance(end + 1 - self.index)
                if line.strip() == delimiter:
                    break
                token.lines.append(line)
        self.heredocs = []

    def _word(self) -> Token:
        text, start, line = self.text, self.index, self.line
        if self.conditional and text.startswith("]]", start):
            self.conditional = False
            return Token(self._advance(2), line)
        while self.index < len(text):
            char = text[self.index]
            if char in " \t\r\n" or (not self.conditional and char in ";&|<>)"):
                break
            if char == "(":
                if not re.fullmatch(r"[A-Za-z_]\w*\+?=", text[start : self.index], re.ASCII):
                    if self.conditional:
                        self._advance(1)
                        continue
                    break
                self._array()
            elif char == "\\":
                self._advance(2)
            elif closer(text, self.index):
                self._advance(span(text, self.index, f"{self.file}:{self.line}") - self.index)
            else:
                self._advance(1)
        if self.index == start:
            self._advance(1)
        raw = text[start : self.index]
        if raw == "[[":
            self.conditional = True
        if raw.isdigit() and self.index < len(text) and text[self.index] in "<>":
            self.numbered = True
            return Token("", line)
        return Token(raw, line)

    def _array(self) -> None:
        """The elements of ``NAME=( ... )``, comments and line breaks included."""
        opened = self.line
        self._advance(1)
        while self.index < len(self.text) and self.text[self.index] != ")":
            char = self.text[self.index]
            if char == "#" and self.text[self.index - 1] in " \t\n(":
                end = self.text.find("\n", self.index)
                self.index = len(self.text) if end < 0 else end
            elif char == "\\":
                self._advance(2)
            elif closer(self.text, self.index):
                self._advance(span(self.text, self.index, f"{self.file}:{self.line}") - self.index)
            else:
                self._advance(1)
        if self.index >= len(self.text):
            raise InputError(
                "an array is opened and never closed",
                where=f"{self.file}:{opened}",
                got="'('",
                allowed="a closing ')'",
                hint="close it; `bash -n` finds the place",
            )
        self._advance(1)
