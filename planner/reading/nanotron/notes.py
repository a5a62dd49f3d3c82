"""What is found on the way through a nanotron configuration: keys that its strict loader refuses, and free findings.

Shared by the parts of the reader; every finding carries the line it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from planner.reading.nanotron.keys import ADAM, SCHEDULER, SECTIONS, Key
from planner.reading.texts.yaml_lines import YamlFile
from planner.specs.finding import Finding, Severity

HOMES: dict[str, Mapping[str, Key]] = {
    **SECTIONS,
    "optimizer.optimizer_factory": ADAM,
    "optimizer.learning_rate_scheduler": SCHEDULER,
}
"""Where a key that stands in the wrong place belongs; older versions had some of them one level higher."""


@dataclass
class Notes:
    """What is found on the way through a file."""

    file: YamlFile
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def find(
        self, finding: str, severity: Severity, message: str, *path: str | int, allowed: str = "", hint: str = ""
    ) -> None:
        self.findings.append(
            Finding(
                id=finding,
                severity=severity,
                message=message,
                where=self.file.where(*path),
                allowed=allowed,
                hint=hint,
            )
        )

    def section(self, value: Any, keys: Mapping[str, Key], *path: str | int) -> dict[str, Any]:
        """The keys of a section that are known and of the right type; the others become findings."""
        name = ".".join(map(str, path))
        if not isinstance(value, dict):
            self.find("wrong-type", "error", f"{name} is {shown(value)}", *path, allowed="a section with keys")
            return {}
        good = {}
        for key, entry in value.items():
            known = keys.get(key) if isinstance(key, str) else None
            if known is None:
                self._unknown(key, keys, *path)
            elif not known.accepts(entry):
                hint = ""
                if isinstance(entry, str) and known.kind == "float":
                    hint = "YAML 1.1 reads 1e-8 as text; write 1.0e-8"
                self.find(
                    "wrong-type",
                    "error",
                    f"{name}.{key} is {shown(entry)}",
                    *path,
                    str(key),
                    allowed=known.allowed,
                    hint=hint,
                )
            elif not known.offers(entry):
                message = f"{name}.{key} is {shown(entry)}"
                self.find("wrong-value", "error", message, *path, str(key), allowed=known.allowed)
            else:
                good[key] = entry
        for key, known in keys.items():
            if known.required and key not in value:
                self.find("missing-key", "error", f"{name}.{key} is missing", *path, allowed=known.allowed)
        return good

    def _unknown(self, key: Any, keys: Mapping[str, Key], *path: str | int) -> None:
        near = get_close_matches(str(key), keys, n=1, cutoff=0.6)
        home = next((name for name, known in HOMES.items() if key in known and name != ".".join(map(str, path))), "")
        hint = f"{key} belongs under {home}" if home else f"did you mean {near[0]}?" if near else ""
        message = f"nanotron has no key {'.'.join(map(str, (*path, key)))}; its loader is strict"
        self.find("unknown-key", "error", message, *path, str(key), allowed=", ".join(keys), hint=hint)


def shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    return "null" if value is None else repr(value)[:60]
