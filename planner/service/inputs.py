"""Guards for everything that comes from outside: numbers, counts with suffixes, and files.

Each guard returns a clean value or raises InputError with where, got, allowed and a hint; it does not know the meaning.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from planner.errors import InputError
from planner.specs.cluster_file import MAX_GPUS
from planner.specs.problems import shown, unreadable

MAX_FILE_BYTES = 1_000_000
"""Model, cluster and plan files are a few kB; anything larger is the wrong file."""
MAX_DEPTH = 50
"""Nesting of a YAML or JSON file; ours need four levels, plan documents about ten."""

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COUNT = re.compile(r"^([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgb]i?)?$", re.IGNORECASE)


def checked_text(value: object, where: str, hint: str) -> str:
    """A non-empty printable string."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 4096:
        raise InputError("this is not usable text", where=where, got=shown(value), allowed="printable text", hint=hint)
    return value.strip()


def checked_int(value: object, where: str, low: int = 1, high: int = MAX_GPUS) -> int:
    """An integer within [low, high]; booleans are refused although Python counts them as integers."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(
            "this number cannot be used",
            where=where,
            got=shown(value),
            allowed=f"a whole number from {low} to {high}",
            hint=f"give {where} a value in that range",
        )
    return value


def checked_float(value: object, where: str, low: float, high: float, *, above: bool = False) -> float:
    """A finite number within [low, high], or (low, high] when ``above``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high or (above and value == low):  # type: ignore[arg-type,operator]
        allowed = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"
        raise InputError(
            "this number cannot be used",
            where=where,
            got=shown(value),
            allowed=allowed,
            hint=f"give {where} a value in that range",
        )
    return float(value)  # type: ignore[arg-type]


def one_of(value: object, where: str, allowed: Iterable[str]) -> str:
    """One of a closed set of words; the hint names the nearest."""
    words = list(allowed)
    if isinstance(value, str) and value in words:
        return value
    near = difflib.get_close_matches(str(value)[:100], words, n=1)
    raise InputError(
        "this choice does not exist",
        where=where,
        got=shown(value),
        allowed=", ".join(words),
        hint=f"did you mean {near[0]}?" if near else f"choose one of the allowed values for {where}",
    )


def count_with_suffix(text: str, where: str) -> tuple[int, bool]:
    """``(count, had_suffix)`` of ``512``, ``4M`` (10**6) or ``4Mi`` (2**20); k, M, G and B are decimal."""
    match = _COUNT.match(text.strip())
    value = (
        Fraction(match[1]) * _SUFFIXES[(match[2] or "").lower()] if match and (match[2] or "").lower() != "bi" else None
    )
    if match is None or value is None or value.denominator != 1 or not 1 <= value <= 10**15:
        raise InputError(
            "this count cannot be read",
            where=where,
            got=shown(text),
            allowed="a whole number, or one with a suffix: k, M, G (decimal) or Ki, Mi, Gi (binary)",
            hint=f"for example {where} 1024, or {where} 4Mi for 4 x 2**20 tokens",
        )
    return int(value), bool(match[2])


def read_text(path: Path, where: str) -> str:
    """The text of a small UTF-8 file."""
    try:
        if path.is_dir():
            raise InputError(
                "this is a folder", where=where, got=str(path), allowed="a file", hint="name the file itself"
            )
        # A pipe is what a shell's <(command) and /dev/stdin behind a | are.
        if not path.is_file() and not path.is_fifo():
            message = "this is neither a file nor a pipe" if path.exists() else "there is no such file"
            raise InputError(message, where=where, got=shown(str(path)), allowed="a file", hint="check the path")
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as problem:
        raise unreadable(problem, where, path) from problem
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(
            "the file is too large",
            where=where,
            got=f"more than {MAX_FILE_BYTES} bytes",
            allowed=f"at most {MAX_FILE_BYTES} bytes",
            hint="this is probably not the file you meant",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(
            "the file is not UTF-8 text",
            where=where,
            got=f"byte 0x{raw[problem.start]:02x} at offset {problem.start}",
            allowed="UTF-8",
            hint="save the file as UTF-8",
        ) from problem


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, merge keys, repeated keys or deep nesting: none of our files needs them."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not supported")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted(str(key) for key, times in Counter(keys).items() if times > 1)
        if repeated:
            raise yaml.YAMLError(f"key given twice: {', '.join(repeated)}")
        return super().construct_mapping(node, deep)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def read_mapping(path: Path, where: str) -> dict[str, Any]:
    """The top-level mapping of a JSON (``*.json``) or YAML file."""
    return parse_mapping(read_text(path, where), where, as_json=path.suffix.lower() == ".json")


def parse_mapping(text: str, where: str, *, as_json: bool) -> dict[str, Any]:
    """The top-level mapping of a JSON or YAML text."""
    try:
        # _PlainLoader is a SafeLoader, so nothing but plain data can be built.
        content = json.loads(text, parse_constant=_no_constant) if as_json else yaml.load(text, Loader=_PlainLoader)  # noqa: S506
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as problem:
        line = str(problem).strip().replace("\n", "; ")
        raise InputError(
            f"the file cannot be parsed: {line[:300]}", where=where, hint="the file must be plain YAML or JSON"
        ) from problem
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(
            "the file does not hold named values",
            where=where,
            got=shown(content),
            allowed="one mapping of names to values",
            hint="write `name: value` lines",
        )
    return content
