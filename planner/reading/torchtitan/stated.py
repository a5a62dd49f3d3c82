"""torchtitan's settings under their names of today: those of the right type, and what the rest is told.

What they mean for a strategy is the reader's part."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, TypeVar

from planner.reading.torchtitan.fields import CLOSED_SECTIONS, FIELDS, FLOAT8_SWITCHES, RENAMED, SAME_MEANING
from planner.reading.torchtitan.sources import Gathered, Setting
from planner.reading.torchtitan.values import converted, in_range
from planner.specs.finding import Finding, Severity

_Read = TypeVar("_Read")


class Stated:
    """What is set, under the names of today, and what is said about it."""

    def __init__(self, gathered: Gathered) -> None:
        self.read = gathered
        self.era = gathered.era
        self.known = FIELDS[gathered.era]
        self.findings, self.unread = list(gathered.findings), list(gathered.unread)
        self.settings: dict[str, Setting] = {}
        self.undefined: set[str] = set()
        """Fields whose value depends on a variable or file that is not given."""
        for name, setting in gathered.settings.items():
            self._accept(name, setting)
        if not gathered.base_known:
            self.undefined |= set(self.known) - set(self.settings)

    def say(self, name: str, message: str, where: str, severity: Severity = "error", **words: Any) -> None:
        """Notes a finding."""
        self.findings.append(Finding(id=name, severity=severity, message=message, where=where, **words))

    def _accept(self, name: str, setting: Setting) -> None:
        """Keeps a setting under its name of today, if its value is of the right type."""
        if name in RENAMED:
            self._renamed(name, setting)
            return
        section = name.partition(".")[0]
        known = self.known.get(name)
        if known is None:
            if "." in name and section in CLOSED_SECTIONS[self.era]:
                self._unknown(name, setting)
            else:
                self.settings[name] = setting
            return
        if setting.unknown:
            self.unread.append(f"{name} ({setting.where}): {', '.join(setting.unknown)} has no value")
            self.undefined.add(name)
            return
        value = converted(setting.value, known.kind)
        if value is None or (known.words and value not in known.words) or not in_range(value, known.kind):
            wanted = {"degree": "a whole number (-1 where the rest is meant)", "count": "a whole number from 1"}
            self.say(
                "value-type",
                f"{name} cannot be {setting.value!r}",
                setting.where,
                got=repr(setting.value)[:80],
                allowed=", ".join(known.words) or wanted.get(known.kind, "true or false"),
            )
            return
        self.settings[name] = Setting(value, setting.where)

    def _renamed(self, name: str, setting: Setting) -> None:
        self.say(
            "renamed-field",
            f"{name} is called {RENAMED[name]} since torchtitan 0.1",
            setting.where,
            "error",
            hint=f"write {RENAMED[name]}" + (' = ["float8"]' if name in FLOAT8_SWITCHES else ""),
        )
        if name in SAME_MEANING:
            self._accept(RENAMED[name], setting)
        elif name in FLOAT8_SWITCHES:
            if converted(setting.value, "switch"):
                self._accept(RENAMED[name], Setting("float8", setting.where))
        else:
            self.unread.append(f"{name} ({setting.where})")

    def _unknown(self, name: str, setting: Setting) -> None:
        other = FIELDS["toml" if self.era == "registry" else "registry"]
        near = get_close_matches(name, [key for key in self.known if key.startswith(name.partition(".")[0])], n=1)
        if name in other:
            versions = "0.1 and 0.2" if self.era == "registry" else "0.3"
            message = f"{name} exists in torchtitan {versions} only"
        else:
            message = f"torchtitan has no field {name}"
        outcome = "the parser refuses it" if self.era == "registry" else "0.2 refuses it, 0.1 ignores it"
        hint = f"did you mean {near[0]}?" if near else "remove it"
        self.say("unknown-field", f"{message}; {outcome}", setting.where, hint=hint)

    def value(self, name: str, default: Any = None) -> Any:
        """The value that holds: the file's, else torchtitan's default."""
        if name in self.settings:
            return self.settings[name].value
        known = self.known.get(name)
        return known.default if known is not None else default

    def if_defined(self, value: _Read | None, *names: str) -> _Read | None:
        """``value``, or None where one of the fields that it follows from is not known."""
        return None if self.undefined.intersection(names) else value

    def where(self, name: str) -> str:
        """Where a field is set, or its name."""
        return self.settings[name].where if name in self.settings else name

    def degree(self, kind: str) -> int:
        """Ranks along one axis, 1 with a finding where the number is none."""
        name = f"parallelism.{kind}_parallel_degree"
        value = int(self.value(name, 1))
        if value >= 1:
            return value
        self.say("degree", f"{name} = {value}", self.where(name), allowed="1 or more", hint="1 switches it off")
        return 1
