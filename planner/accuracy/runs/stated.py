"""Reads the free-form part of a record (``run.extra``), where a source may have put anything under any name.

What has another form than expected counts as not stated, so that it falls under the rule for what is not stated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.specs.measurement import MeasuredConfiguration


def settings(run: MeasuredConfiguration, name: str) -> Mapping[str, Any]:
    """A group of further settings, empty where the record has none of that form."""
    return group(run.extra.get(name))


def group(value: object) -> Mapping[str, Any]:
    """Named values, empty where it is something else."""
    return value if isinstance(value, Mapping) else {}
