"""Small text tools of the renderers: names that are safe in a comment, quoted words, aligned tables.

Names of models and hosts come from users; nothing of theirs reaches a shell, a Python module or a host list except
through here.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import InputError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Variable:
    """An environment variable of a launch script."""

    name: str
    value: str
    why: str

    @property
    def assignment(self) -> str:
        """``NAME=value`` with the value quoted for a shell."""
        return f"{self.name}={shlex.quote(self.value)}"

    @property
    def why_lines(self) -> list[str]:
        """The reason as lines that fit a comment."""
        return textwrap.wrap(self.why, width=110)


EXPANDABLE_SEGMENTS = Variable(
    "PYTORCH_CUDA_ALLOC_CONF",
    "expandable_segments:True",
    "Grows memory segments instead of adding new ones, which keeps fragmentation within the estimate.",
)
"""Set for every framework: the estimates' allocator factors were measured with it."""


@dataclass(frozen=True)
class Flag:
    """One command-line option with its values, and a remark where the choice needs one."""

    words: tuple[str, ...]
    remark: str = ""

    @property
    def line(self) -> str:
        """The option as one line of a shell array."""
        text = " ".join(_quoted(word) for word in self.words)
        return f"{text}  # {self.remark}" if self.remark else text


def _quoted(word: str) -> str:
    # A comma inside an array reads like a separator, so it is quoted although the shell does not ask for it.
    return f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word)


def flag(name: str, *values: object, remark: str = "") -> Flag:
    """An option from a name and values of any printable type."""
    return Flag((name, *(str(value) for value in values)), remark)


def one_line(text: str) -> str:
    """``text`` without control characters, back-ticks and quotes, fit for comments, docstrings and Markdown."""
    cleaned = "".join(char if char.isprintable() and char not in "`\"'\\<>|" else " " for char in text)
    return " ".join(cleaned.split()) or "unnamed"


def checked_hosts(hosts: Sequence[str], nodes: int) -> tuple[str, ...]:
    """Host names for every node; placeholders when none are given."""
    if not hosts:
        return tuple(f"node{index:03d}" for index in range(1, nodes + 1))
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise InputError(
                "a host name holds characters that host names cannot have",
                where="hosts",
                got=repr(host),
                allowed="letters, digits, dots, hyphens and underscores",
            )
    if len(set(hosts)) != nodes or len(hosts) != nodes:
        raise InputError(
            "the hosts do not match the nodes of the plan",
            where="hosts",
            got=f"{len(hosts)} names, {len(set(hosts))} of them distinct",
            allowed=f"{nodes} distinct names, the first one leads",
        )
    return tuple(hosts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
