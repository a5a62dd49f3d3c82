"""Something that the author of a configuration or the owner of machines should know, found in their texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: it cannot be used like this, or does not do what it says; warning: it works, but wrong or slow; note: worth
knowing."""
RANK: Mapping[Severity, int] = {"error": 0, "warning": 1, "note": 2}
"""The order in which findings are told."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding."""

    id: str
    """Stable, kebab-case; the id of the backend's rule where one is broken."""
    severity: Severity
    message: str
    where: str = ""
    """File, line, key, flag, GPU, node or variable."""
    got: str = ""
    """What it says, or an equation with its values."""
    allowed: str = ""
    """What would be accepted."""
    hint: str = ""
    """What to write or do instead."""
    unless: tuple[str, ...] = ()
    """Architectures of accelerators on which it is not so; which ones a job runs on is known to none of its files."""

    def told(self) -> dict[str, str]:
        """The fields that a document has."""
        return {name: str(getattr(self, name)) for name in _TOLD}


_TOLD = ("id", "severity", "message", "where", "got", "allowed", "hint")
