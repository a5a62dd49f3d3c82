"""Figures as people read them: three digits, and a unit in which they are no powers of ten."""

from __future__ import annotations

import pytest

from planner.units import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (4.5e-5, "45 us"),
        (0.9996e-3, "1 ms"),
        (0.32, "320 ms"),
        (0.9996, "1 s"),
        (14.66, "14.7 s"),
        (99.96, "100 s"),
        (1234.4, "1234 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
