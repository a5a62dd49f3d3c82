"""Reads the free-form part of a record (``run.extra``), where a source may have put anything under any name.

What has another form than expected counts as not stated, so that it falls under the rule for what is not stated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.specs.measurement import MAX_RANKS, MeasuredConfiguration


def settings(run: MeasuredConfiguration, name: str) -> Mapping[str, Any]:
    """A group of further settings, empty where the record has none of that form."""
    return group(run.extra.get(name))


def group(value: object) -> Mapping[str, Any]:
    """Named values, empty where it is something else."""
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float | None:
    """A finite number, also as text; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def degree(value: object) -> int | None:
    """A whole number of ranks, replicas or micro-batches; None where it is none."""
    found = number(value)
    return int(found) if found is not None and found == int(found) and 0 < found <= MAX_RANKS else None
