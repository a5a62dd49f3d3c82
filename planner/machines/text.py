"""Guards for pasted text: what terminals, editors and shells leave in it is taken out before a reader looks at it.

Bytes become text here as well, because Windows shells redirect output as UTF-16."""

from __future__ import annotations

import codecs
import re
from functools import lru_cache

from planner.errors import InputError
from planner.specs.finding import Finding, Severity

MAX_TEXT_BYTES = 64_000_000
"""A Kubernetes node is about 20 kB of JSON, so this holds three thousand of them."""
MAX_COUNT = 1_000_000
"""Nodes, GPUs or cores; larger numbers are slips or something else."""
MAX_GPUS_PER_NODE = 1024
"""Also slots of a host; no node has as many."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Terminal control sequences (ECMA-48 CSI and OSC, and two-character ones)."""
_ESCAPES_LOST = re.compile(r"\[[0-9;]{1,8}m")
"""Colour sequences whose escape character an editor or a web form has dropped."""
_KEPT = "\n\t"
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def decode(raw: bytes, where: str) -> str:
    """Text from UTF-8 or, where a byte order mark says so, UTF-16; InputError for anything else."""
    if len(raw) > MAX_TEXT_BYTES:
        raise InputError(
            "the text is too large",
            where=where,
            got=f"more than {MAX_TEXT_BYTES} bytes",
            allowed=f"at most {MAX_TEXT_BYTES} bytes",
            hint="this is probably not the output you meant",
        )
    encoding = next((name for mark, name in _BOMS if raw.startswith(mark)), "utf-8")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as problem:
        raise InputError(
            "this is not text",
            where=where,
            got=f"byte 0x{raw[problem.start]:02x} at offset {problem.start}" if problem.start < len(raw) else "bytes",
            allowed="UTF-8 text",
            hint="save the command's output as text",
        ) from problem


@lru_cache(maxsize=1)
def clean(text: str) -> str:
    """Text without terminal control sequences and other control characters; only line ends and tabs stay.

    The last result is kept, because every source looks at the same text."""
    plain = _ESCAPES_LOST.sub("", _ESCAPES.sub("", text))
    lines = plain.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    # What is left of them would move the cursor, ring or turn the direction of writing when a name is printed.
    return "".join(filter(_kept, lines))


def _kept(character: str) -> bool:
    return character.isprintable() or character in _KEPT


def printable(text: str) -> str:
    """One line that can be printed anywhere, at most 200 characters."""
    return "".join(character for character in text[:200] if character.isprintable())


def whole(text: str | None, high: int = MAX_COUNT) -> int | None:
    """A whole number up to ``high`` written in ASCII digits, else None."""
    stripped = (text or "").strip()
    if not re.fullmatch(r"[0-9]{1,12}", stripped):
        return None
    value = int(stripped)
    return value if value <= high else None


def span(numbers: tuple[int, ...] | list[int]) -> str:
    """``0-3``, ``0-1, 4`` or ``5`` for sorted distinct numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def listed(names: list[str] | tuple[str, ...], limit: int = 6) -> str:
    """The first names of a long list, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def note(identifier: str, message: str, *, where: str = "", hint: str = "") -> Finding:
    """A finding that is only worth knowing."""
    return _finding(identifier, "note", message, where, hint)


def warning(identifier: str, message: str, *, where: str = "", hint: str = "") -> Finding:
    """A finding that changes what can be planned."""
    return _finding(identifier, "warning", message, where, hint)


def _finding(identifier: str, severity: Severity, message: str, where: str, hint: str) -> Finding:
    """Names in it may hold tabs."""
    message, where, hint = (part.replace("\t", " ") for part in (message, where, hint))
    return Finding(id=identifier, severity=severity, message=message, where=where, hint=hint)
