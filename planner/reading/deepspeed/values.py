"""Values of a DeepSpeed configuration with their types checked: what is read, what is wrong, and what stays unread.

Each section is gone through once against its table of keys; the rest of the reader takes values and never looks at raw
JSON again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from planner.reading.deepspeed.keys import AUTO_FILLED, NULL_TAKEN, Key
from planner.reading.texts.lenient_json import Path
from planner.specs.finding import Finding, Severity

_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")
LARGEST = 10**19
"""No count in a configuration is larger; a value beyond is a slip, and would overflow the arithmetic that follows."""


def shown(value: object) -> str:
    """A value for people: short, on one line, and printable whatever it holds."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Notes:
    """What is found on the way."""

    locate: Callable[[Path], str]
    """The place of a key, as findings name it."""
    filled: Mapping[Path, Any] = field(default_factory=dict)
    """What Hugging Face arguments put in the place of ``auto``; None where the value depends on the model."""
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unfilled: list[Path] = field(default_factory=list)
    """Keys that stay ``auto``."""

    def add(
        self,
        id: str,  # noqa: A002
        severity: Severity,
        message: str,
        path: Path,
        *,
        allowed: str = "",
        hint: str = "",
    ) -> None:
        self.findings.append(
            Finding(id=id, severity=severity, message=message, where=self.locate(path), allowed=allowed, hint=hint)
        )

    def leave(self, path: Path, value: object) -> None:
        """List a setting that bears on speed or memory and has no field."""
        self.unread.append(f"{dotted(path)} = {shown(value)}")


def dotted(path: Path) -> str:
    """``zero_optimization.stage``."""
    return ".".join(shown(part) for part in path)


@dataclass
class Section:
    """One JSON object of the configuration, converted by its table of keys."""

    notes: Notes
    raw: Mapping[Any, Any]
    path: Path
    keys: Mapping[str, Key]
    checked: bool
    """Pydantic looks at the section: unknown keys are refused and texts are converted."""
    values: dict[str, Any] = field(default_factory=dict)
    """Converted values of the keys that are there and could be read."""

    def __post_init__(self) -> None:
        for name, value in self.raw.items():
            spec = self.keys.get(name) if isinstance(name, str) else None
            if spec is None:
                self._unknown(name)
                continue
            converted = self._convert(name, spec, value)
            if converted is not None:
                self.values[name] = converted
                if spec.bears and converted != spec.default:
                    self.notes.leave((*self.path, name), converted if spec.type != "section" else "{...}")

    def get(self, name: str) -> Any:
        """The converted value; where the key is absent, DeepSpeed's default; None where it could not be read."""
        if name in self.values:
            return self.values[name]
        return None if self.stated(name) else self.keys[name].default

    def stated(self, name: str) -> bool:
        """Whether the key is there with a value."""
        return self.raw.get(name) is not None

    def at(self, name: str) -> Path:
        return (*self.path, name)

    def _unknown(self, name: object) -> None:
        path = (*self.path, name if isinstance(name, str) else repr(name))
        if not self.checked and re.match(r"[_/#]|(?i:comment)", str(name)):
            # People write remarks this way; DeepSpeed takes them.
            return
        close = get_close_matches(str(name), list(self.keys), n=1, cutoff=0.75)
        hint = f"write {close[0]!r} if that is what is meant" if close else "remove it"
        if self.checked:
            self.notes.add(
                "unknown-key", "error", f"DeepSpeed refuses the unknown key {shown(name)!r} here", path, hint=hint
            )
        else:
            self.notes.add(
                "ignored-key",
                "error" if close else "warning",
                f"DeepSpeed does not know {shown(name)!r} and ignores it without a word",
                path,
                hint=hint,
            )

    def _convert(self, name: str, spec: Key, value: Any) -> Any:
        path = self.at(name)
        if value == "auto" and spec.type != "any":
            value = self._auto(path)
        if value is None:
            null_section = spec.type == "section" and not self.path and name not in NULL_TAKEN
            if self.raw[name] is None and (null_section or (self.checked and spec.default is not None)):
                self._refused(path, "a JSON object" if null_section else f"a {spec.type}", None)
            return None
        if spec.type == "any":
            return value
        if spec.type == "section":
            return value if isinstance(value, Mapping) else self._refused(path, "a JSON object", value)
        if spec.type == "list":
            return value if isinstance(value, list | tuple) else self._refused(path, "a list", value)
        if spec.type == "text":
            return value if isinstance(value, str) else self._refused(path, "a text", value)
        if spec.type == "integer":
            return self.integer(path, value, least=spec.least)
        return self.number(path, value) if spec.type == "number" else self.boolean(path, value)

    def _auto(self, path: Path) -> Any:
        """What ``auto`` becomes; None, with a finding, where nothing fills it in."""
        if path in self.notes.filled:
            value = self.notes.filled[path]
            if value is None:
                source = AUTO_FILLED.get(tuple(str(part) for part in path), "the model")
                self.notes.unread.append(f"{dotted(path)} = auto: follows {source}")
            return value
        self.notes.unfilled.append(path)
        return None

    def integer(self, path: Path, value: Any, *, least: int = 0) -> int | None:
        """A whole number of at least ``least``."""
        if isinstance(value, bool):
            self.notes.add(
                "wrong-type", "warning", f"{shown(value)} counts as {int(value)}", path, hint="write a number"
            )
            return int(value)
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            self._text_for(path, value, "number")
            value = int(value)
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if not isinstance(value, int):
            self._refused(path, "a whole number", value)
            return None
        if not least <= value <= LARGEST:
            self.notes.add("out-of-range", "error", f"{shown(value)} cannot be", path, allowed=f"{least} or more")
            return None
        return value

    def number(self, path: Path, value: Any) -> float | None:
        """A finite number."""
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                self._refused(path, "a number", value)
                return None
            self._text_for(path, value, "number")
            value = number
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refused(path, "a number", value)
            return None
        if abs(value) > LARGEST or not math.isfinite(value):
            self._refused(path, "a finite number", value)
            return None
        return float(value)

    def boolean(self, path: Path, value: Any) -> bool | None:
        """True or false; texts and numbers as pydantic or as Python would take them."""
        if isinstance(value, bool):
            return value
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
            self._text_for(path, value, "boolean")
            return value.strip().lower() in _TRUE
        self._refused(path, "true or false", value)
        return None

    def _text_for(self, path: Path, value: str, what: str) -> None:
        """A text where JSON has a type of its own."""
        plain = value.strip().lower()
        right = plain if what == "number" else ("true" if plain in _TRUE else "false")
        if self.checked:
            message = f'"{shown(value)}" is a text; DeepSpeed converts it here, other programs do not'
        elif what == "boolean":
            message = f'"{shown(value)}" is a text: Python takes any text for true, or stops with a TypeError'
        else:
            message = f'"{shown(value)}" is a text; DeepSpeed computes with it and stops with a TypeError'
        self.notes.add(
            "wrong-type",
            "warning" if self.checked else "error",
            message,
            path,
            allowed=f"a {what}",
            hint=f"write {right[:40]} without quotation marks",
        )

    def _refused(self, path: Path, wanted: str, value: object) -> Any:
        """The finding; its None stands in the place of the value that cannot be read."""
        self.notes.add("wrong-type", "error", f"{shown(value)} is not {wanted}", path, allowed=wanted)
        return None


def report_unfilled(notes: Notes) -> None:
    """One finding for each key that stays ``auto``, with the argument that would fill it."""
    for path in notes.unfilled:
        source = AUTO_FILLED.get(tuple(str(part) for part in path))
        nested = len(path) > 1
        alone = "drops the key and takes its default" if nested else "stops with a TypeError"
        if source is None:
            notes.add(
                "auto-not-filled",
                "error",
                f"nothing fills in auto here: Hugging Face Trainer leaves it, DeepSpeed itself {alone}",
                path,
                hint="write the value",
            )
        else:
            notes.add(
                "auto-needs-arguments",
                "warning",
                f"auto stands for a value of Hugging Face TrainingArguments; DeepSpeed itself {alone}",
                path,
                allowed=f"filled in from {source}",
                hint="give the training arguments, too, or write the value",
            )
        notes.unread.append(f"{dotted(path)} = auto")
