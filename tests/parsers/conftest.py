"""Counts of what the frameworks' own parsers were given and refused, for the table at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parsers.matrix import PROPERTY, Row

Counts = Callable[[Row], None]


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Counts:
    """Adds a row to the table; rows of one target and parser are summed."""
    return lambda row: record_property(PROPERTY, row.model_dump_json())
