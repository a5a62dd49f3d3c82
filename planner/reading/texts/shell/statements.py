"""Follows the statements of one text of a script: branches, loops, functions, assignments and commands.

What they leave behind is kept by the machine that runs them; nothing is started."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from planner.errors import InputError
from planner.reading.texts.shell.conditions import Status, beyond_knowledge, combined, tested
from planner.reading.texts.shell.expansion import MAX_DEPTH
from planner.reading.texts.shell.tokens import Token, raw_tokens
from planner.reading.texts.shell.words import NAME, UNKNOWN, Command, Word, shown, unknown_names

if TYPE_CHECKING:
    from planner.reading.texts.shell.script import Machine

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=", re.ASCII)
_SEPARATORS = frozenset({";", "\n", "&", "|", "&&", "||", ";;", "(", ")"})
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ACTIVATES = frozenset({"activate", ".bashrc", ".bash_profile", ".profile", "profile", "conda.sh", "set_env.sh"})
"""Sourced files that prepare the machine and hold no arguments."""


class Runner:
    """Follows the tokens of one text, statement by statement."""

    def __init__(
        self, machine: Machine, tokens: list[Token], file: str, depth: int = 0, *, doubt: bool = False
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
        if self.depth > MAX_DEPTH:
            raise InputError(
                "blocks are nested too deeply",
                where=self._here(),
                got="a nested block",
                hint="name the part of the script that starts the training",
            )
        status: Status = True
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

    def _statement(self, *, active: bool) -> Status:
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

    def _condition(self, active: bool) -> Status:
        """The status of the commands between ``if`` and ``then``."""
        status: Status = None
        joined = ""
        while self.index < len(self.tokens) and self.tokens[self.index].raw != "then":
            token = self.tokens[self.index]
            if token.operator:
                joined = token.raw if token.raw in ("&&", "||") else joined
                self.index += 1
                continue
            found = self._statement(active=active)
            status = combined(status, found, joined)
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

    def _words_until(self, stops: frozenset[str]) -> list[Token]:
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
        unsure = active and beyond_knowledge(subject)
        if unsure:
            self.machine.script.missing.append(f"{place} (a case block)")
        open_still = active and not unsure
        for patterns, body in _branches(tokens[2:]):
            texts = [self.machine.joined(pattern.raw, self.file, pattern.line).text for pattern in patterns]
            fits = open_still and any(fnmatchcase(UNKNOWN.sub("", subject), text) for text in texts)
            open_still = open_still and not fits
            doubt = self.doubt or unsure
            Runner(self.machine, body, self.file, self.depth, doubt=doubt).block(active=fits)

    def _case_tokens(self) -> list[Token]:
        """Everything up to the ``esac`` that closes the block."""
        start, depth = self.index, 1
        while self.index < len(self.tokens) and depth:
            raw = self.tokens[self.index].raw
            depth += (raw == "case") - (raw == "esac")
            self.index += 1
        return self.tokens[start : self.index - (depth == 0)]

    def _simple(self, active: bool) -> Status:
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

    def _function(self, tokens: list[Token]) -> bool:
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

    def _body(self) -> list[Token]:
        """The tokens up to the brace that closes the one just passed."""
        start, depth = self.index, 1
        while self.index < len(self.tokens) and depth:
            raw = self.tokens[self.index].raw
            depth += (raw == "{") - (raw == "}")
            self.index += 1
        return self.tokens[start : self.index - (depth == 0)]

    def _command(self, tokens: list[Token], streams: list[Token]) -> Status:
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

    def _assignment(self, token: Token, *, keep: bool) -> tuple[str, str]:
        found = _ASSIGNMENT.match(token.raw)
        if found is None:
            return "", ""
        name, add, raw = found[1], bool(found[3]), token.raw[found.end() :]
        array = raw.startswith("(") and raw.endswith(")")
        if array:
            words = [
                word
                for inner in raw_tokens(raw[1:-1], self.file, token.line)
                if not inner.operator and not inner.stream
                for word in self.machine.expand(inner, self.file)
            ]
        else:
            words = [self.machine.joined(raw, self.file, token.line)]
        if keep:
            self.machine.assign(name, words, add=add, array=array)
        return name, shown(" ".join(word.text for word in words))

    def _started(self, tokens: list[Token], before: dict[str, str]) -> Status:
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

    def _read(self, words: list[Word], before: dict[str, str], streams: list[Token]) -> None:
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
        pieces += [""] * (len(names) - len(pieces))
        found = [Word(piece, value.where, unknown_names(piece)) for piece in pieces]
        for position, name in enumerate(names[:1] if array else names):
            self.machine.assign(name, found if array else [found[position]], add=False, array=array)

    def _written(self, streams: list[Token]) -> None:
        """``cat > FILE <<EOF`` writes a file that the script may start later."""
        documents = [token for token in streams if token.stream == "document"]
        targets = [token for token in streams if token.stream == "into"]
        if documents and targets:
            path = shown(self.machine.joined(targets[-1].raw, self.file, targets[-1].line).text)
            self.machine.files[path] = shown(self.machine.here(documents[-1], self.file).text)

    def _declared(self, tokens: list[Token]) -> None:
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
            if kind == "text" and len(machine.running) <= MAX_DEPTH:
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

    def _test(self, tokens: list[Token]) -> Status:
        parts = [self._operand(token) for token in tokens[1:] if token.raw not in ("]", "]]")]
        self.unsure = self.unsure or any(map(beyond_knowledge, parts))
        return tested(parts)

    def _operand(self, token: Token) -> str:
        if token.raw in ("&&", "||", "!", "(", ")", "==", "=", "!=", "<", ">", "=~") or token.raw.startswith("-"):
            return token.raw
        return self.machine.joined(token.raw, self.file, token.line).text


def _read_words(words: list[str]) -> tuple[str, list[str]]:
    """Letters of the options of ``read``, and its names; some options take a word."""
    flags, names, valued = "", [], False
    for word in words:
        if valued:
            valued = False
        elif word.startswith("-"):
            flags, valued = flags + word[1:], word[-1] in "dnNptu"
        elif NAME.fullmatch(word):
            names.append(word)
    return flags, names


def _branches(tokens: list[Token]) -> Iterator[tuple[list[Token], list[Token]]]:
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


def _has_command(tokens: list[Token]) -> bool:
    """Whether something other than assignments follows on the line."""
    return any(not _ASSIGNMENT.match(token.raw) for token in tokens)


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
