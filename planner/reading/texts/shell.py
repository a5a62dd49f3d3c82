"""What a bash script would start, and with which words: arrays, strings, defaults and branches followed, nothing run.

Covers the part of the language that launch scripts are written in; whatever depends on a command's output or on a
variable that nobody sets stays marked in the words that it reaches, so that a reader can say which value is unknown."""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from planner.errors import InputError

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around the name of a variable without a value, inside of texts (private-use characters, which no script holds)."""
_VEIL = 0xF0000
"""Added to the characters of such a name, so that its spaces, quotes and bars mean nothing to the shell."""
_UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SEPARATORS = frozenset({";", "\n", "&", "|", "&&", "||", ";;", "(", ")"})
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "c": ("SLURM_CPUS_PER_TASK",),
}
"""Variables that a Slurm job finds set, by the option that decides them."""
_ACTIVATES = frozenset({"activate", ".bashrc", ".bash_profile", ".profile", "profile", "conda.sh", "set_env.sh"})
"""Sourced files that prepare the machine and hold no arguments."""
_MAX_DEPTH = 40
"""Nested expansions, sourced files and blocks; a script that goes deeper refers to itself."""
_MAX_CALLS = 2_000
"""Calls of functions; more only come from one that calls itself twice."""
_MAX_WORDS = 200_000
"""Words of a script after expansion; more only come from a variable that doubles itself."""


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


@dataclass
class Script:
    """What became of a script."""

    commands: list[Command] = field(default_factory=list)
    arrays: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    """Arrays and strings, split into words, by name, in the order of their first assignment."""
    directives: dict[str, str] = field(default_factory=dict)
    """``#SBATCH`` options, hyphenated, without their dashes."""
    missing: list[str] = field(default_factory=list)
    """Sourced files that are not among those given, and blocks that were not followed, with their place."""
    sourced: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    """Variables without a value that may have one: a branch sets them whose condition cannot be known, or a sourced
    file is missing that may set them."""


@dataclass(frozen=True)
class _Token:
    raw: str
    line: int
    operator: bool = False
    stream: Literal["", "document", "string", "into"] = ""
    """What a redirection gives the command (``<<``, ``<<<``) or where it writes (``>``); ``raw`` is its target."""
    lines: list[str] = field(default_factory=list)
    """Of a here-document."""


def read_script(files: Mapping[str, str], name: str) -> Script:
    """The script ``name`` of ``files``, with the files that it sources; InputError where its quotes do not close."""
    machine = _Machine(files)
    try:
        machine.file(name)
        for function in [*machine.functions]:
            if function not in machine.called:
                machine.call(function, [])
    except RecursionError as error:
        raise InputError("the script is nested too deeply", where=name, got="blocks and calls") from error
    machine.script.doubtful -= set(machine.variables)
    machine.script.arrays = {
        key: tuple(Word(shown(text), word.where, _names(text)) for word in value for text in word.text.split())
        for key, value in machine.variables.items()
    }
    return machine.script


def entry_scripts(files: Mapping[str, str]) -> list[str]:
    """The files that no other file sources or starts, in the order given."""
    texts = {name: _without_comments(text) for name, text in files.items()}
    named = {
        name
        for name in files
        for other, text in texts.items()
        if other != name and re.search(_mention(name), text, re.M)
    }
    return [name for name in files if name not in named] or list(files)


def _mention(name: str) -> str:
    return rf"(?:^|[\s/;'\"]){re.escape(posixpath.basename(name))}(?=$|[\s;'\")])"


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


# --- From text to raw words


def _span(text: str, start: int, where: str) -> int:
    """End of the quoted or substituted part that begins at ``start``."""
    stack = [_closer(text, start)]
    index = start + len(_opener(text, start))
    while stack:
        if index >= len(text):
            raise InputError(
                "a quote or bracket is opened and never closed",
                where=where,
                got=repr(text[start : start + 40]),
                allowed=f"a closing {stack[-1]!r}",
            )
        closing, char = stack[-1], text[index]
        if text.startswith(closing, index):
            index += len(stack.pop())
        elif closing == "'":
            index += 1
        elif char == "\\":
            index += 2
        elif _closer(text, index) and not (closing == '"' and char == "'"):
            stack.append(_closer(text, index))
            index += len(_opener(text, index))
        elif closing == ")" and char == "(":
            stack.append(")")
            index += 1
        else:
            index += 1
    return min(index, len(text))


def _opener(text: str, index: int) -> str:
    return next((opener for opener in _PAIRS if text.startswith(opener, index)), "")


def _closer(text: str, index: int) -> str:
    return _PAIRS.get(_opener(text, index), "")


_PAIRS = {"$((": "))", "$(": ")", "${": "}", "'": "'", '"': '"', "`": "`"}


_STREAMS: Mapping[str, Literal["document", "string", "into"]] = {
    "<<": "document",
    "<<-": "document",
    "<<<": "string",
    ">": "into",
    ">|": "into",
}


def _tokens(text: str, file: str, first_line: int = 1) -> list[_Token]:
    """Raw words and separators, comments and here-documents left out."""
    return list(_Scanner(text, file, first_line).scan())


class _Scanner:
    def __init__(self, text: str, file: str, line: int) -> None:
        self.text, self.file, self.line = text, file, line
        self.index = 0
        self.heredocs: list[_Token] = []
        self.conditional = False
        self.numbered = False
        """Whether a number stands before the redirection: it is not the standard stream."""

    def scan(self) -> Iterator[_Token]:
        text = self.text
        while self.index < len(text):
            char = text[self.index]
            if char == "\n":
                yield _Token("\n", self.line, True)
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

    def _operator(self) -> Iterator[_Token]:
        text, line = self.text, self.line
        if text[self.index] in "<>" or text.startswith(("&>", "|&"), self.index):
            yield from self._redirection()
            return
        two = text[self.index : self.index + 2]
        yield _Token(self._advance(2 if two in ("&&", "||", ";;") else 1), line, True)

    def _redirection(self) -> Iterator[_Token]:
        """What goes into the command and out of it; a here-document follows at the end of the line."""
        mark = re.compile(r"<<<|<<-?|&>>?|\|&|[<>]&|>>|>\||<>|[<>]").match(self.text, self.index)
        self.index = mark.end() if mark else self.index + 1
        kind, numbered = mark.group() if mark else "", self.numbered
        self.numbered = False
        if kind == "|&":
            yield _Token("|", self.line, True)
            return
        while self.index < len(self.text) and self.text[self.index] in " \t":
            self.index += 1
        if self.index < len(self.text) and self.text[self.index] not in "\n;&|":
            if self.text.startswith(("<(", ">("), self.index):
                self.index += 1
            if self.text[self.index] == "(":
                self._advance(_span("$" + self.text[self.index :], 0, f"{self.file}:{self.line}") - 1)
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

    def _word(self) -> _Token:
        text, start, line = self.text, self.index, self.line
        if self.conditional and text.startswith("]]", start):
            self.conditional = False
            return _Token(self._advance(2), line)
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
            elif _closer(text, self.index):
                self._advance(_span(text, self.index, f"{self.file}:{self.line}") - self.index)
            else:
                self._advance(1)
        if self.index == start:
            self._advance(1)
        raw = text[start : self.index]
        if raw == "[[":
            self.conditional = True
        if raw.isdigit() and self.index < len(text) and text[self.index] in "<>":
            self.numbered = True
            return _Token("", line)
        return _Token(raw, line)

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
            elif _closer(self.text, self.index):
                self._advance(_span(self.text, self.index, f"{self.file}:{self.line}") - self.index)
            else:
                self._advance(1)
        if self.index >= len(self.text):
            raise InputError(
                "an array is opened and never closed", where=f"{self.file}:{opened}", got="'('", allowed="a closing ')'"
            )
        self._advance(1)


# --- Following the script


_Status = bool | None
"""Whether a command succeeded; None where that is not known."""


class _Machine:
    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        """Those given, and those that the script writes from a here-document."""
        self.script = Script()
        self.variables: dict[str, list[Word]] = {}
        self.exported: set[str] = set()
        self.functions: dict[str, tuple[list[_Token], str]] = {}
        """Bodies with their file."""
        self.called: set[str] = set()
        self.calls = 0
        self.inside = 0
        """Functions that are followed at this moment."""
        self.unsourced = False
        """Whether a file that may set variables was sourced and is missing."""
        self.running: list[str] = []
        self.before: list[Word] = []
        self.written = 0

    def file(self, name: str) -> None:
        text = self.files[name].lstrip("\ufeff")
        for line in text.splitlines():
            found = re.match(r"#SBATCH\s+(-\S+?)(?:[=\s]\s*(\S+))?\s*(?:#.*)?$", line)
            if found:
                self._directive(found[1].lstrip("-").replace("_", "-"), found[2] or "", name)
        self.running.append(name)
        self.text(text, name)
        self.running.pop()

    def _directive(self, option: str, value: str, file: str) -> None:
        """Keeps an ``#SBATCH`` option and sets the variables that Slurm makes of a number."""
        self.script.directives.setdefault(option, value)
        if re.fullmatch(r"\d{1,6}", value):
            for variable in _SLURM.get(option, ()):
                self.variables.setdefault(variable, [Word(value, file)])

    def text(self, text: str, file: str, line: int = 1) -> None:
        _Runner(self, _tokens(text, file, line), file).block(active=True)

    def sourced(self, path: str, arguments: list[Word]) -> bool:
        """Runs the file that ``path`` names, with its arguments, if it is among those given."""
        wanted = posixpath.normpath(path)
        same = [n for n in self.files if posixpath.normpath(n) == wanted]
        same = same or [n for n in self.files if posixpath.basename(n) == posixpath.basename(wanted)]
        if not same or same[0] in self.running or len(self.running) > _MAX_DEPTH:
            return False
        self.script.sourced.add(same[0])
        self.with_arguments(arguments, lambda active: self.file(same[0]))
        return True

    def call(self, function: str, arguments: list[Word]) -> None:
        """Follows a function's body with its arguments."""
        tokens, file = self.functions[function]
        self.called.add(function)
        self.calls += 1
        if self.inside < _MAX_DEPTH and self.calls < _MAX_CALLS:
            self.inside += 1
            self.with_arguments(arguments, _Runner(self, tokens, file).block)
            self.inside -= 1

    def with_arguments(self, arguments: list[Word], follow: Callable[..., object]) -> None:
        """Follows statements that find ``arguments`` under their numbers; what they assign stays."""
        outer = self.variables
        if arguments:
            numbered = {str(number): [word] for number, word in enumerate(arguments, 1)}
            self.variables = {**_named(outer), **numbered, "@": arguments}
        follow(active=True)
        positions = {key: value for key, value in outer.items() if not _NAME.match(key)}
        self.variables = {**_named(self.variables), **positions}

    def assign(self, name: str, words: list[Word], *, add: bool, array: bool) -> None:
        old = self.variables.get(name, []) if add else []
        if old and not array:
            last = words[0] if words else Word("", old[-1].where)
            words = [*old[:-1], Word(old[-1].text + last.text, last.where, old[-1].unset + last.unset)]
        elif add:
            words = [*old, *words]
        self.written += len(words)
        if self.written > _MAX_WORDS or sum(len(word.text) for word in words) > 50 * _MAX_WORDS:
            raise InputError("the script expands without end", where=words[0].where if words else name, got=name)
        self.variables[name] = words

    def environment(self) -> dict[str, str]:
        """Exported variables that have a value."""
        names = sorted(self.exported & set(self.variables))
        return {name: shown(" ".join(word.text for word in self.variables[name])) for name in names}

    # --- Expansion

    def here(self, token: _Token, file: str) -> Word:
        """The text of a here-document or here-string; a quoted delimiter leaves the document as it stands."""
        if token.stream == "string":
            return self.joined(token.raw, file, token.line)
        text = "\n".join(token.lines)
        if not re.search("['\"\\\\]", token.raw):
            # Quotation marks are plain characters there, and a backslash before one stays.
            plain = re.sub(r'(\\?)"', lambda found: found[1] * 2 + '\\"', text)
            text = self.joined(f'"{plain}"', file, token.line).text
        return Word(text, f"{file}:{token.line + 1}", _names(text))

    def expand(self, token: _Token, file: str, depth: int = 0) -> list[Word]:
        """The words that a raw word becomes."""
        if depth > _MAX_DEPTH:
            raise InputError("expansions are nested too deeply", where=f"{file}:{token.line}", got=token.raw[:40])
        return _Expansion(self, file, token.line, depth).words(token.raw)

    def joined(self, raw: str, file: str, line: int, depth: int = 0) -> Word:
        """A raw word as one word, not split (the value of an assignment)."""
        found = _Expansion(self, file, line, depth, split=False).words(raw)
        text = " ".join(word.text for word in found)
        return Word(text, found[0].where if len(found) == 1 else f"{file}:{line}", _names(text))


def _named(variables: Mapping[str, list[Word]]) -> dict[str, list[Word]]:
    """Without the arguments of a function."""
    return {name: value for name, value in variables.items() if _NAME.match(name)}


def shown(text: str) -> str:
    """``text`` with ``$NAME`` where a value is not known."""
    return _UNKNOWN.sub(lambda found: "$" + _name(found[1]), text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_name, _UNKNOWN.findall(text))))


def _mark(name: str) -> str:
    """The mark of an unknown value; marks inside of ``name`` are written out."""
    return _OPEN + "".join(chr(_VEIL + ord(char)) for char in shown(name) if ord(char) < _VEIL) + _CLOSE


def _name(mark: str) -> str:
    return "".join(chr(ord(char) - _VEIL) if ord(char) >= _VEIL else char for char in mark)


class _Expansion:
    """One raw word on its way to the words that it becomes."""

    def __init__(self, machine: _Machine, file: str, line: int, depth: int, *, split: bool = True) -> None:
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
            self.found.append(Word(self.current, self.place, _names(self.current)))
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
                end = _span(raw, index, self.place)
                self._add(raw[index + 1 : end - 1])
                index = end
            elif char == '"':
                end = _span(raw, index, self.place)
                self._add("")
                self._part(raw[index + 1 : end - 1], quoted=True)
                index = end
            elif char in "$`":
                index = self._dollar(raw, index, quoted)
            else:
                self._add(char)
                index += 1

    def _dollar(self, raw: str, index: int, quoted: bool) -> int:
        opener = _opener(raw, index)
        if opener in ("$((", "$(", "`", "${"):
            end = _span(raw, index, self.place)
            inside = raw[index + len(opener) : end - len(_PAIRS[opener])]
            if opener == "$((":
                self._value([Word(self._arithmetic(inside), "")], quoted)
            elif opener == "${":
                self._parameter(inside, quoted)
            else:
                self._substituted(inside, quoted)
            return end
        name = _NAME.match(raw, index + 1)
        if name:
            self._parameter(name.group(), quoted)
            return name.end()
        special = raw[index + 1 : index + 2]
        if special and (special in "@*" or special.isdigit()):
            self._parameter(special, quoted)
            return index + 2
        if special and special in "#?$!-":
            self._add(_mark(special))
            return index + 2
        self._add(raw[index])
        return index + 1

    def _substituted(self, inside: str, quoted: bool) -> None:
        """``$(cat <<EOF ...)`` is the text that follows; what another command prints is not known."""
        if re.match(r"\s*cat\s*<<-?[^<]", inside):
            found = [token for token in _tokens(inside, self.file, self.line) if token.stream == "document"]
            self._value([self.machine.here(found[0], self.file)], quoted)
        else:
            self._add(_mark(f"({inside.strip()[:60]})"))

    def _arithmetic(self, text: str) -> str:
        inner = _Expansion(self.machine, self.file, self.line, self.depth + 1, split=False).words(text)
        plain = " ".join(word.text for word in inner)
        plain = _NAME.sub(lambda found: self._number(found.group()), plain) if not _names(plain) else plain
        value = None if _names(plain) else integer_value(plain)
        return str(value) if value is not None else _mark(f"(({text.strip()[:60]}))")

    def _number(self, name: str) -> str:
        value = self.machine.variables.get(name)
        return value[0].text if value and value[0].text else _mark(name)

    def _parameter(self, inside: str, quoted: bool) -> None:
        found = re.match(r"(!?)([A-Za-z_]\w*|\d+|[@*#?])(\[[^]]*\])?", inside, re.ASCII)
        if not found or found[1] or inside.startswith("#"):
            self._add(_mark("{" + inside[:60] + "}"))
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
            self._add(_mark("{" + inside[:60] + "}"))
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
        self._add(_mark(f"{{{name}}}" if name.isdigit() and len(name) > 1 else name))

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
            self._add(_mark(name))
        else:
            if self.depth > _MAX_DEPTH:
                raise InputError("expansions are nested too deeply", where=self.place, got=text[:40])
            self._deeper(text, quoted)
            if operation.endswith("="):
                inner = self.machine.joined(text, self.file, self.line, self.depth + 1)
                self.machine.variables[name] = [inner]

    def _deeper(self, text: str, quoted: bool) -> None:
        inner = _Expansion(self.machine, self.file, self.line, self.depth + 1, split=self.split and not quoted)
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


class _Runner:
    """Follows the tokens of one text, statement by statement."""

    def __init__(
        self, machine: _Machine, tokens: list[_Token], file: str, depth: int = 0, *, doubt: bool = False
    ) -> None:
        self.machine, self.tokens, self.file = machine, tokens, file
        self.index = 0
        self.depth = depth
        self.doubt = doubt
        """Whether the statements that are skipped now may run."""
        self.unsure = False
        """Whether a test since the last condition compared something that cannot be known."""

    def block(self, *, active: bool, until: frozenset[str] = frozenset()) -> str:
        """Runs (or skips) statements up to one of the words ``until``, which it returns."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise InputError("blocks are nested too deeply", where=self._here(), got="a nested block")
        status: _Status = True
        follow = True
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            if token.operator:
                self.index += 1
                follow = {"&&": status is True, "||": status is False}.get(token.raw, True)
                continue
            if token.raw in until:
                self.index += 1
                self.depth -= 1
                return token.raw
            status = self._statement(active=active and follow)
        self.depth -= 1
        return ""

    def _here(self) -> str:
        last = min(self.index, len(self.tokens) - 1)
        return f"{self.file}:{self.tokens[last].line}" if self.tokens else self.file

    def _statement(self, *, active: bool) -> _Status:
        word = self.tokens[self.index].raw
        blocks = {"if": self._if, "for": self._for, "while": self._loop, "until": self._loop, "case": self._case}
        if word in blocks:
            self.index += 1
            blocks[word](active)
            return True
        if word in ("{", "}", "then", "do", "done", "fi", "else", "esac", "time"):
            self.index += 1
            return True
        if word == "!":
            self.index += 1
            status = self._statement(active=active) if self.index < len(self.tokens) else None
            return None if status is None else not status
        return self._simple(active)

    def _condition(self, active: bool) -> _Status:
        """The status of the commands between ``if`` and ``then``."""
        status: _Status = None
        joined = ""
        while self.index < len(self.tokens) and self.tokens[self.index].raw != "then":
            token = self.tokens[self.index]
            if token.operator:
                joined = token.raw if token.raw in ("&&", "||") else joined
                self.index += 1
                continue
            found = self._statement(active=active)
            status = _combined(status, found, joined)
            joined = ""
        self.index += 1
        return status

    def _if(self, active: bool) -> None:
        taken, outer = False, self.doubt
        while True:
            self.unsure = False
            holds = self._condition(active and not taken) is True and not taken
            self.doubt = self.doubt or self.unsure
            ended = self.block(active=active and holds, until=frozenset({"elif", "else", "fi"}))
            taken = taken or holds
            if ended == "else":
                self.block(active=active and not taken, until=frozenset({"fi"}))
            if ended != "elif":
                self.doubt = outer
                return

    def _words_until(self, stops: frozenset[str]) -> list[_Token]:
        words = []
        while self.index < len(self.tokens) and self.tokens[self.index].raw not in stops:
            if not self.tokens[self.index].operator:
                words.append(self.tokens[self.index])
            self.index += 1
        self.index += 1
        return words

    def _for(self, active: bool) -> None:
        """A loop over words runs once, with the first of them."""
        head = self._words_until(frozenset({"do"}))
        if active and len(head) > 2 and head[1].raw == "in":
            first = [word for token in head[2:] for word in self.machine.expand(token, self.file)]
            self.machine.variables[head[0].raw] = first[:1]
            self.machine.script.missing.append(f"{self.file}:{head[0].line} (a loop, followed once)")
        self.block(active=active, until=frozenset({"done"}))

    def _loop(self, active: bool) -> None:
        if active:
            self.machine.script.missing.append(f"{self._here()} (a loop)")
        self._words_until(frozenset({"do"}))
        self.block(active=False, until=frozenset({"done"}))

    def _case(self, active: bool) -> None:
        """Follows the first branch whose pattern fits; none where the word cannot be known."""
        tokens, place = self._case_tokens(), self._here()
        subject = self.machine.joined(tokens[0].raw, self.file, tokens[0].line).text if tokens else ""
        unsure = active and _beyond_knowledge(subject)
        if unsure:
            self.machine.script.missing.append(f"{place} (a case block)")
        open_still = active and not unsure
        for patterns, body in _branches(tokens[2:]):
            texts = [self.machine.joined(pattern.raw, self.file, pattern.line).text for pattern in patterns]
            fits = open_still and any(fnmatchcase(_UNKNOWN.sub("", subject), text) for text in texts)
            open_still = open_still and not fits
            doubt = self.doubt or unsure
            _Runner(self.machine, body, self.file, self.depth, doubt=doubt).block(active=fits)

    def _case_tokens(self) -> list[_Token]:
        """Everything up to the ``esac`` that closes the block."""
        start, depth = self.index, 1
        while self.index < len(self.tokens) and depth:
            raw = self.tokens[self.index].raw
            depth += (raw == "case") - (raw == "esac")
            self.index += 1
        return self.tokens[start : self.index - (depth == 0)]

    def _simple(self, active: bool) -> _Status:
        """One simple command: assignments, a test, a sourced file, or something that would be started."""
        tokens, streams = [], []
        conditional = self.tokens[self.index].raw == "[["
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            if token.operator and token.raw in _SEPARATORS:
                break
            self.index += 1
            if token.stream:
                streams.append(token)
            elif token.raw:
                tokens.append(token)
            if conditional and token.raw == "]]":
                break
        if self._function(tokens):
            return True
        if not active and self.doubt:
            self.machine.script.doubtful |= {found[1] for token in tokens if (found := _ASSIGNMENT.match(token.raw))}
        return self._command(tokens, streams) if active and tokens else None

    def _function(self, tokens: list[_Token]) -> bool:
        """Keeps the body of ``name() {``; one in other brackets is followed in place."""
        words = [token.raw for token in tokens]
        brackets = [token.raw for token in self.tokens[self.index : self.index + 2]] == ["(", ")"]
        keyword = words[:1] == ["function"] and len(words) > 1
        if not keyword and not (len(words) == 1 and brackets):
            return False
        self.index += 2 * brackets
        # The brace may stand on the next line, or end the words of ``function name {``.
        opened = words[-1] == "{"
        start = self.index
        while start < len(self.tokens) and self.tokens[start].raw == "\n":
            start += 1
        if not opened and [token.raw for token in self.tokens[start : start + 1]] != ["{"]:
            return True
        self.index = start + (not opened)
        self.machine.functions[words[1] if keyword else words[0]] = (self._body(), self.file)
        return True

    def _body(self) -> list[_Token]:
        """The tokens up to the brace that closes the one just passed."""
        start, depth = self.index, 1
        while self.index < len(self.tokens) and depth:
            raw = self.tokens[self.index].raw
            depth += (raw == "{") - (raw == "}")
            self.index += 1
        return self.tokens[start : self.index - (depth == 0)]

    def _command(self, tokens: list[_Token], streams: list[_Token]) -> _Status:
        first = tokens[0].raw
        if first == "[[" or first in ("[", "test"):
            return self._test(tokens)
        before: dict[str, str] = {}
        while tokens and _ASSIGNMENT.match(tokens[0].raw):
            name, word = self._assignment(tokens[0], keep=len(tokens) == 1)
            before[name] = word
            tokens = tokens[1:]
            while len(tokens) > 1 and _ASSIGNMENT.match(tokens[0].raw) and not _has_command(tokens):
                name, word = self._assignment(tokens[0], keep=True)
                tokens = tokens[1:]
        if not tokens:
            return True
        if not _has_command(tokens) and _ASSIGNMENT.match(tokens[0].raw):
            self._assignment(tokens[0], keep=True)
            return True
        if tokens[0].raw == "read":
            self._read([word for token in tokens for word in self.machine.expand(token, self.file)], before, streams)
            return True
        if tokens[0].raw == "cat" and len(tokens) == 1:
            self._written(streams)
            return True
        return self._started(tokens, before)

    def _assignment(self, token: _Token, *, keep: bool) -> tuple[str, str]:
        found = _ASSIGNMENT.match(token.raw)
        if found is None:
            return "", ""
        name, add, raw = found[1], bool(found[3]), token.raw[found.end() :]
        array = raw.startswith("(") and raw.endswith(")")
        if array:
            words = [
                word
                for inner in _tokens(raw[1:-1], self.file, token.line)
                if not inner.operator and not inner.stream
                for word in self.machine.expand(inner, self.file)
            ]
        else:
            words = [self.machine.joined(raw, self.file, token.line)]
        if keep:
            self.machine.assign(name, words, add=add, array=array)
        return name, shown(" ".join(word.text for word in words))

    def _started(self, tokens: list[_Token], before: dict[str, str]) -> _Status:
        machine, first = self.machine, tokens[0].raw
        if first in _DECLARING:
            self._declared(tokens)
            return True
        words = [word for token in tokens for word in machine.expand(token, self.file)]
        if not words:
            return True
        if words[0].text in ("source", ".") and len(words) > 1:
            if not machine.sourced(words[1].text, words[2:]):
                path = shown(words[1].text)
                machine.script.missing.append(f"{words[0].where} (source {path})")
                machine.unsourced = machine.unsourced or posixpath.basename(path) not in _ACTIVATES
            return True
        if words[0].text in machine.functions:
            machine.call(words[0].text, words[1:])
            return None
        if words[0].text == "unset":
            for word in words[1:]:
                machine.variables.pop(word.text, None)
            return True
        if words[0].text in ("set", "cd", "echo", "mkdir", "printf", "true", ":", "module", "ulimit", "sleep", "wait"):
            return True
        if words[0].text == "false":
            return False
        self._recorded(words, before)
        return True

    def _read(self, words: list[Word], before: dict[str, str], streams: list[_Token]) -> None:
        """``read NAMES <<< TEXT``: its fields go to the names; without a text they are not known."""
        flags, names = _read_words([word.text for word in words[1:]])
        given = [token for token in streams if token.stream != "into"]
        if not given:
            for name in names:
                self.machine.variables.pop(name, None)
            return
        value = self.machine.here(given[-1], self.file)
        text = value.text if "d" in flags else value.text.partition("\n")[0].strip()
        separators = before.get("IFS", " ")
        between = f"[{re.escape(separators)}]" if separators.strip() else r"\s+"
        array = "a" in flags
        pieces = re.split(between, text, maxsplit=0 if array else len(names) - 1) if array or names[1:] else [text]
        found = [Word(piece, value.where, _names(piece)) for piece in (*pieces, *[""] * (len(names) - len(pieces)))]
        for position, name in enumerate(names[:1] if array else names):
            self.machine.assign(name, found if array else [found[position]], add=False, array=array)

    def _written(self, streams: list[_Token]) -> None:
        """``cat > FILE <<EOF`` writes a file that the script may start later."""
        documents = [token for token in streams if token.stream == "document"]
        targets = [token for token in streams if token.stream == "into"]
        if documents and targets:
            path = shown(self.machine.joined(targets[-1].raw, self.file, targets[-1].line).text)
            self.machine.files[path] = shown(self.machine.here(documents[-1], self.file).text)

    def _declared(self, tokens: list[_Token]) -> None:
        for token in tokens[1:]:
            found = _ASSIGNMENT.match(token.raw)
            if found:
                self._assignment(token, keep=True)
            if tokens[0].raw == "export" or tokens[1].raw in ("-x", "-gx", "-xg"):
                self.machine.exported.add(found[1] if found else token.raw)

    def _recorded(self, words: list[Word], before: dict[str, str]) -> None:
        """Keeps the command, or follows the script or text that a shell is started with."""
        machine = self.machine
        inner = _shell_call(words)
        if inner is not None:
            kind, word = inner
            if kind == "text" and len(machine.running) <= _MAX_DEPTH:
                machine.running.append("")
                outer, machine.before = machine.before, [*machine.before, *_launcher_words(words)]
                file, _, line = word.where.rpartition(":")
                machine.text(word.text, file, int(line) if line.isdigit() else 1)
                machine.before = outer
                machine.running.pop()
                return
            after = words[words.index(word) + 1 :] if kind == "file" else []
            if kind == "file" and machine.sourced(word.text, after):
                return
        shown_words = tuple(Word(shown(word.text), word.where, word.unset) for word in [*machine.before, *words])
        machine.script.commands.append(Command(shown_words, {**machine.environment(), **before}))

    # --- Tests

    def _test(self, tokens: list[_Token]) -> _Status:
        parts = [self._operand(token) for token in tokens[1:] if token.raw not in ("]", "]]")]
        self.unsure = self.unsure or any(map(_beyond_knowledge, parts))
        return _tested(parts)

    def _operand(self, token: _Token) -> str:
        if token.raw in ("&&", "||", "!", "(", ")", "==", "=", "!=", "<", ">", "=~") or token.raw.startswith("-"):
            return token.raw
        return self.machine.joined(token.raw, self.file, token.line).text


def _beyond_knowledge(text: str) -> bool:
    """Whether an argument of the script or the output of a command stands in it; a variable that nobody sets is
    empty."""
    return any(re.fullmatch(r"\d+|\{\d+\}|\(.*", name, re.S) for name in _names(text))


def _read_words(words: list[str]) -> tuple[str, list[str]]:
    """Letters of the options of ``read``, and its names; some options take a word."""
    flags, names, valued = "", [], False
    for word in words:
        if valued:
            valued = False
        elif word.startswith("-"):
            flags, valued = flags + word[1:], word[-1] in "dnNptu"
        elif _NAME.fullmatch(word):
            names.append(word)
    return flags, names


def _branches(tokens: list[_Token]) -> Iterator[tuple[list[_Token], list[_Token]]]:
    """(patterns, statements) of each branch of a case block."""
    index = 0
    while index < len(tokens):
        patterns = []
        while index < len(tokens) and not (tokens[index].operator and tokens[index].raw == ")"):
            if not tokens[index].operator:
                patterns.append(tokens[index])
            index += 1
        start, depth = index + 1, 0
        while index < len(tokens) and (depth or tokens[index].raw != ";;"):
            depth += (tokens[index].raw == "case") - (tokens[index].raw == "esac")
            index += 1
        yield patterns, tokens[start:index]
        index += 1


def _has_command(tokens: list[_Token]) -> bool:
    """Whether something other than assignments follows on the line."""
    return any(not _ASSIGNMENT.match(token.raw) for token in tokens)


def _combined(first: _Status, second: _Status, joined: str) -> _Status:
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


def _tested(parts: list[str]) -> _Status:
    """A test's outcome where no variable is set that the script does not set itself."""
    for joiner in ("||", "&&"):
        if joiner in parts:
            place = parts.index(joiner)
            return _combined(_tested(parts[:place]), _tested(parts[place + 1 :]), joiner)
    if parts[:1] == ["!"]:
        inner = _tested(parts[1:])
        return None if inner is None else not inner
    if len(parts) == 2 and parts[0] in _UNARY:
        text = _UNKNOWN.sub("", parts[1])
        # Files of the machine it runs on are not looked for.
        return {"-n": text != "", "-z": text == ""}.get(parts[0], False)
    if len(parts) == 1:
        return _UNKNOWN.sub("", parts[0]) != ""
    return _compared(parts) if len(parts) == 3 else None


def _compared(parts: list[str]) -> _Status:
    left, sign, right = _UNKNOWN.sub("", parts[0]), parts[1], _UNKNOWN.sub("", parts[2])
    if sign in ("=", "=="):
        return left == right
    if sign == "!=":
        return left != right
    if sign in _NUMERIC:
        one, other = integer_value(left or "0"), integer_value(right or "0")
        return None if one is None or other is None else _NUMERIC[sign](one, other)
    return None


def _launcher_words(words: list[Word]) -> list[Word]:
    """srun or mpirun with its options, where it starts a shell that starts the rest."""
    if posixpath.basename(words[0].text) not in ("srun", "mpirun", "mpiexec"):
        return []
    shell = next((i for i, word in enumerate(words) if posixpath.basename(word.text) in ("bash", "sh")), 0)
    return words[:shell]


def _shell_call(words: list[Word]) -> tuple[str, Word] | None:
    """The text of ``bash -c TEXT`` (also behind srun and exec), of ``eval TEXT``, or the file of ``bash FILE``."""
    if words[0].text == "eval" and len(words) > 1:
        return "text", Word(" ".join(word.text for word in words[1:]), words[1].where)
    for position, word in enumerate(words):
        if posixpath.basename(word.text) in ("bash", "sh"):
            rest = words[position + 1 :]
            flags = [other for other in rest if re.fullmatch(r"-[a-z]*c", other.text)]
            if flags and flags[0] is not rest[-1]:
                return "text", rest[rest.index(flags[0]) + 1]
            named = next((other for other in rest if not other.text.startswith("-")), None)
            return ("file", named) if named else None
    plain = next((word for word in words if word.text not in ("exec", "nohup", "sudo")), None)
    return ("file", plain) if plain is not None and plain.text.endswith((".sh", ".bash")) else None


# --- Launchers


@dataclass(frozen=True)
class Launch:
    """A training script that a launcher starts."""

    script: Word | None
    """Path, or module after ``-m``; None where only arguments stand there."""
    arguments: tuple[Word, ...]
    environment: Mapping[str, str]
    options: Mapping[str, Word]
    """Options of the launcher, hyphenated and without dashes."""
    launcher: str
    """torchrun, srun, mpirun, deepspeed, accelerate, python, or nothing."""
    nodes: int | None = None
    per_node: int | None = None
    processes: int | None = None
    """All processes, where that is what the launcher is told."""

    @property
    def gpus(self) -> int | None:
        """One GPU a process."""
        if self.processes is not None:
            return self.processes
        return None if self.nodes is None or self.per_node is None else self.nodes * self.per_node


_SWITCHES = frozenset(
    {"standalone", "no-python", "module", "m", "run-path", "exclusive", "label", "l", "u", "use-env", "multi-gpu"}
    | {"allow-run-as-root", "no-local-rank", "overlap", "unbuffered", "use-deepspeed", "use-fsdp", "bind-to-none"}
)
"""Launcher options that take no value."""
_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}
_NODE_OPTIONS = ("nnodes", "num-nodes", "nodes", "N", "num-machines")
_LOCAL_OPTIONS = ("nproc-per-node", "ntasks-per-node", "gpus-per-node", "num-gpus", "npernode")
_SPREADING: Mapping[str, Iterable[str]] = {
    "torchrun": ("nnodes",),
    "deepspeed": ("num-nodes", "hostfile", "H", "include", "i", "exclude", "e"),
}
"""Options without which a launcher stays on its node."""
_TOTAL_OPTIONS = ("ntasks", "n", "np", "num-processes")


def launches(script: Script) -> list[Launch]:
    """Every command of a script that starts Python, with the launchers around it."""
    return [found for command in script.commands if (found := _launch(command, script.directives)) is not None]


def _launch(command: Command, directives: Mapping[str, str]) -> Launch | None:
    words = list(command.words)
    place = next((i for i, word in enumerate(words) if _is_start(word.text)), None)
    if place is None:
        return None
    outer, _, _ = _options(words[:place])
    start = posixpath.basename(words[place].text)
    rest = words[place + 1 :]
    launcher = "python"
    options: dict[str, Word] = {}
    if start in _LAUNCHERS:
        launcher = _LAUNCHERS[start]
        rest = rest[1:] if start == "accelerate" else rest
    elif not start.endswith(".py"):
        rest, module = _python_module(rest)
        launcher = _LAUNCHERS.get(module, "python")
    else:
        rest = words[place:]
    if launcher != "python":
        options, rest, _ = _options(rest)
    target, arguments = _target(rest)
    given = {**{key: Word(text, "#SBATCH") for key, text in directives.items()}, **outer, **options}
    alone = launcher in _SPREADING and options.keys().isdisjoint(_SPREADING[launcher])
    inside = launcher if launcher != "python" or place == 0 else posixpath.basename(words[0].text)
    return Launch(
        target,
        tuple(arguments),
        command.environment,
        options or outer,
        inside,
        _count(given, _NODE_OPTIONS) or (1 if alone else None),
        _count(options or given, _LOCAL_OPTIONS),
        None if launcher == "torchrun" else _count(given, _TOTAL_OPTIONS) or _included(options),
    )


def _included(options: Mapping[str, Word]) -> int | None:
    """GPUs that DeepSpeed's launcher is told to use: ``host:0,1@host:2``."""
    text = next((options[name].text for name in ("include", "i") if name in options), "")
    hosts = text.split("@")
    if not all(re.fullmatch(r"[^:]+:\d+(,\d+)*", host) for host in hosts):
        return None
    return sum(len(host.split(",")) for host in hosts)


def _is_start(text: str) -> bool:
    name = posixpath.basename(text)
    return name in _LAUNCHERS or re.fullmatch(r"python[\d.]*", name) is not None or name.endswith(".py")


def _python_module(words: list[Word]) -> tuple[list[Word], str]:
    """What follows ``python``, and the launcher module that it runs, if it does."""
    index = 0
    while index < len(words) and re.fullmatch(r"-[uBOIsSE]+", words[index].text):
        index += 1
    if index + 1 < len(words) and words[index].text == "-m" and words[index + 1].text in _LAUNCHERS:
        return words[index + 2 :], words[index + 1].text
    return words[index:], ""


def _target(words: list[Word]) -> tuple[Word | None, list[Word]]:
    if words and words[0].text in ("-m", "--module") and len(words) > 1:
        return words[1], words[2:]
    if words and not words[0].text.startswith("-"):
        return words[0], words[1:]
    return None, words


def _options(words: list[Word]) -> tuple[dict[str, Word], list[Word], int]:
    """Options of a launcher up to the first word that is neither an option nor its value."""
    options: dict[str, Word] = {}
    index = 0
    while index < len(words):
        text = words[index].text
        if not text.startswith("-"):
            if index == 0 or words[0] is words[index]:
                break
            if posixpath.basename(words[0].text) in ("srun", "mpirun", "mpiexec", "env", "exec"):
                index += 1
                continue
            break
        name, equals, value = text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in ("m", "module"):
            break
        if equals:
            options[name] = Word(value, words[index].where, words[index].unset)
        elif name in _SWITCHES or index + 1 >= len(words):
            options[name] = Word("", words[index].where)
        else:
            index += 1
            options[name] = words[index]
        index += 1
    if words and posixpath.basename(words[0].text) in ("srun", "mpirun", "mpiexec", "exec", "env"):
        inner, _, _ = _options(words[1:])
        options = {**options, **inner}
    return options, words[index:], index


def _count(options: Mapping[str, Word], names: tuple[str, ...]) -> int | None:
    for name in names:
        if name in options:
            text = options[name].text
            # torchrun takes a range of nodes: the last is what the job is sized for.
            number = text.rpartition(":")[2]
            if number.isdigit() and len(number) < 7:
                return int(number)
    return None
