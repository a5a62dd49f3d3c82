"""Values as Hugging Face's YAML and JSON files state them, with the place of each and what was said about it.

Booleans come as strings ("no", "false"), numbers as text, and a missing value follows the framework's default: the
caller says which.  Nothing here knows a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from planner.errors import InputError
from planner.reading.texts.yaml_lines import compose_yaml, line_shown
from planner.specs.finding import Finding, Severity

TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")
"""Words that accelerate takes for booleans (accelerate/utils/environment.py, str_to_bool)."""

MAX_DEPTH = 30
MAX_NODES = 20_000
"""No configuration is deeper or larger; aliases that multiply stop here."""


@dataclass
class Notes:
    """Findings and unread settings, collected while a file is read."""

    where: str
    """Name of the file."""
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def place(self, *path: str) -> str:
        """``file:line: key`` as far as it is known."""
        line = self.lines.get(path)
        return self.where + (f":{line}" if line else "") + (f": {'.'.join(path)}" if path else "")

    def add(
        self,
        rule: str,
        severity: Severity,
        message: str,
        *path: str,
        allowed: str = "",
        hint: str = "",
    ) -> None:
        """One more finding about the key at ``path``."""
        finding = Finding(
            id=rule, severity=severity, message=message, where=self.place(*path), allowed=allowed, hint=hint
        )
        self.findings.append(finding)

    def skip(self, setting: str) -> None:
        """A setting that is not modelled."""
        self.unread.append(setting)


@dataclass(frozen=True)
class Section:
    """A mapping of the file with typed access; what has the wrong type becomes a finding."""

    values: Mapping[str, Any]
    notes: Notes
    path: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def section(self, name: str) -> Section:
        """A nested mapping; empty where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            self._wrong(name, value, "a mapping")
        return Section(value if isinstance(value, Mapping) else {}, self.notes, (*self.path, name))

    def truth(self, name: str, default: bool | None = None) -> bool | None:
        """A boolean or a word for one."""
        value = self.values.get(name)
        if value is None:
            return default
        word = str(value).strip().lower()
        if word in TRUE or word in FALSE:
            return word in TRUE
        if word != "auto":
            self._wrong(name, value, "true or false")
        return None

    def count(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """A whole number of at least ``least``; text and floats without a fraction count too."""
        value = self.values.get(name)
        if value is None:
            return default
        number = whole(value)
        if number is not None and number >= least:
            return number
        if value != "auto":
            self._wrong(name, value, f"a whole number of at least {least}")
        return None

    def word(self, name: str) -> str | None:
        """Text, without surrounding space."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, Mapping | list):
            self._wrong(name, value, "text")
            return None
        return str(value).strip()

    def add(self, rule: str, severity: Severity, message: str, name: str, *, allowed: str = "", hint: str = "") -> None:
        """A finding about a key of this section."""
        self.notes.add(rule, severity, message, *self.path, name, allowed=allowed, hint=hint)

    def _wrong(self, name: str, value: Any, allowed: str) -> None:
        self.add("wrong-type", "error", f"{name} is {shown(value)}", name, allowed=allowed)


def whole(value: Any) -> int | None:
    """``value`` as a whole number, or None; "1e3" and 8.0 are whole, True and 2.5 are not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)) > 30:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def shown(value: Any) -> str:
    """A value short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_json(text: str, where: str) -> Mapping[str, Any]:
    """The object that a JSON file holds; InputError with the line where it is none."""
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"this is not JSON: {error.msg}",
            where=f"{where}:{error.lineno}",
            got=line_shown(text, error.lineno),
            hint="correct the line named",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            "this JSON cannot be read", where=where, got=str(error)[:80], hint="name the configuration file itself"
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            "the file holds no JSON object",
            where=where,
            got=shown(value),
            allowed="{...}",
            hint="name the configuration file itself",
        )
    return value


def read_yaml(text: str, where: str) -> Section:
    """The mapping that a YAML file holds, with the line of every key; InputError where it is none."""
    node = compose_yaml(where, text)
    notes = Notes(where)
    lines: dict[tuple[str, ...], int] = {}
    builder = _Builder(notes, lines)
    notes.lines = lines
    value = builder.value(node, ()) if node is not None else None
    if not isinstance(value, dict):
        raise InputError(
            "the file holds no YAML mapping",
            where=where,
            got=shown(value),
            allowed="key: value lines",
            hint="name the configuration file itself",
        )
    return Section(value, notes)


class _Builder:
    """Plain values from YAML nodes, with the lines of keys; repeated keys are told."""

    def __init__(self, notes: Notes, lines: dict[tuple[str, ...], int]) -> None:
        self.notes, self.lines, self.seen = notes, lines, 0
        self.scalars = yaml.SafeLoader("")

    def value(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        self.seen += 1
        if len(path) > MAX_DEPTH or self.seen > MAX_NODES:
            raise InputError(
                "this YAML is too deep or too large for a configuration",
                where=f"{self.notes.where}:{node.start_mark.line + 1}",
                allowed=f"at most {MAX_DEPTH} levels and {MAX_NODES} values, aliases counted as often as they are used",
                hint="name the configuration file itself",
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        try:
            return self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            return str(node.value)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            here = (*path, key)
            if key in values:
                self.notes.add("repeated-key", "warning", f"{key} stands twice; the last one counts", *here)
            self.lines[here] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, here)
        return values
