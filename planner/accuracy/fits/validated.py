"""The committed results of the last fit: out-of-fold errors of every class, and what each effect of the model is worth.

``make fit`` writes them (data/validation.json); tables and documents read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.accuracy.runs.records import DATA
from planner.specs.accuracy import EffectRow, Validation

FILE = DATA / "validation.json"


def write(classes: Mapping[str, Validation], effects: Sequence[EffectRow], path: Path = FILE) -> None:
    """Replace the committed results."""
    document = {
        "classes": {name: row.model_dump() for name, row in classes.items()},
        "effects": [row.model_dump() for row in effects],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def validation_of(name: str) -> Validation | None:
    """Out-of-fold errors of a class (or "all")."""
    row = _document()["classes"].get(name)
    return None if row is None else Validation.model_validate(row)


def effects() -> tuple[EffectRow, ...]:
    """The error of the whole model, then of the model without each effect."""
    return tuple(EffectRow.model_validate(row) for row in _document()["effects"])
