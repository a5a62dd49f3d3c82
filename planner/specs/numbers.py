"""Numbers in free-form settings, where a file may have put anything under any name.

What has another form than expected counts as not stated."""

from __future__ import annotations

import math

from planner.specs.measurement import MAX_RANKS


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
