"""What a bash script would start, and with which words: arrays, strings, defaults and branches followed, nothing run.

Covers the part of the language that launch scripts are written in; whatever depends on a command's output or on a
variable that nobody sets stays marked in the words that it reaches, so that a reader can say which value is unknown."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.errors import InputError
from planner.reading.texts.shell.expansion import MAX_DEPTH, Expansion
from planner.reading.texts.shell.statements import Runner
from planner.reading.texts.shell.tokens import Token, raw_tokens
from planner.reading.texts.shell.words import NAME, Command, Word, shown, unknown_names

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
_MAX_CALLS = 2_000
"""Calls of functions; more only come from one that calls itself twice."""
_MAX_WORDS = 200_000
"""Words of a script after expansion; more only come from a variable that doubles itself."""


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


def read_script(files: Mapping[str, str], name: str) -> Script:
    """The script ``name`` of ``files``, with the files that it sources; InputError where its quotes do not close."""
    machine = Machine(files)
    try:
        machine.file(name)
        for function in [*machine.functions]:
            if function not in machine.called:
                machine.call(function, [])
    except RecursionError as error:
        raise InputError(
            "the script is nested too deeply",
            where=name,
            got="blocks and calls",
            hint="name the part of the script that starts the training",
        ) from error
    machine.script.doubtful -= set(machine.variables)
    machine.script.arrays = {
        key: tuple(Word(shown(text), word.where, unknown_names(text)) for word in value for text in word.text.split())
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


class Machine:
    """What a shell remembers: variables, functions, files, and what became of the script so far."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        """Those given, and those that the script writes from a here-document."""
        self.script = Script()
        self.variables: dict[str, list[Word]] = {}
        self.exported: set[str] = set()
        self.functions: dict[str, tuple[list[Token], str]] = {}
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
        Runner(self, raw_tokens(text, file, line), file).block(active=True)

    def sourced(self, path: str, arguments: list[Word]) -> bool:
        """Runs the file that ``path`` names, with its arguments, if it is among those given."""
        wanted = posixpath.normpath(path)
        same = [n for n in self.files if posixpath.normpath(n) == wanted]
        same = same or [n for n in self.files if posixpath.basename(n) == posixpath.basename(wanted)]
        if not same or same[0] in self.running or len(self.running) > MAX_DEPTH:
            return False
        self.script.sourced.add(same[0])
        self.with_arguments(arguments, lambda active: self.file(same[0]))
        return True

    def call(self, function: str, arguments: list[Word]) -> None:
        """Follows a function's body with its arguments."""
        tokens, file = self.functions[function]
        self.called.add(function)
        self.calls += 1
        if self.inside < MAX_DEPTH and self.calls < _MAX_CALLS:
            self.inside += 1
            self.with_arguments(arguments, Runner(self, tokens, file).block)
            self.inside -= 1

    def with_arguments(self, arguments: list[Word], follow: Callable[..., object]) -> None:
        """Follows statements that find ``arguments`` under their numbers; what they assign stays."""
        outer = self.variables
        if arguments:
            numbered = {str(number): [word] for number, word in enumerate(arguments, 1)}
            self.variables = {**_named(outer), **numbered, "@": arguments}
        follow(active=True)
        positions = {key: value for key, value in outer.items() if not NAME.match(key)}
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
            raise InputError(
                "the script expands without end",
                where=words[0].where if words else name,
                got=name,
                hint="name the part of the script that starts the training",
            )
        self.variables[name] = words

    def environment(self) -> dict[str, str]:
        """Exported variables that have a value."""
        names = sorted(self.exported & set(self.variables))
        return {name: shown(" ".join(word.text for word in self.variables[name])) for name in names}

    # --- Expansion

    def here(self, token: Token, file: str) -> Word:
        """The text of a here-document or here-string; a quoted delimiter leaves the document as it stands."""
        if token.stream == "string":
            return self.joined(token.raw, file, token.line)
        text = "\n".join(token.lines)
        if not re.search("['\"\\\\]", token.raw):
            # Quotation marks are plain characters there, and a backslash before one stays.
            plain = re.sub(r'(\\?)"', lambda found: found[1] * 2 + '\\"', text)
            text = self.joined(f'"{plain}"', file, token.line).text
        return Word(text, f"{file}:{token.line + 1}", unknown_names(text))

    def expand(self, token: Token, file: str, depth: int = 0) -> list[Word]:
        """The words that a raw word becomes."""
        if depth > MAX_DEPTH:
            raise InputError(
                "expansions are nested too deeply",
                where=f"{file}:{token.line}",
                got=token.raw[:40],
                hint="name the part of the script that starts the training",
            )
        return Expansion(self, file, token.line, depth).words(token.raw)

    def joined(self, raw: str, file: str, line: int, depth: int = 0) -> Word:
        """A raw word as one word, not split (the value of an assignment)."""
        found = Expansion(self, file, line, depth, split=False).words(raw)
        text = " ".join(word.text for word in found)
        return Word(text, found[0].where if len(found) == 1 else f"{file}:{line}", unknown_names(text))


def _named(variables: Mapping[str, list[Word]]) -> dict[str, list[Word]]:
    """Without the arguments of a function."""
    return {name: value for name, value in variables.items() if NAME.match(name)}
