"""A pin of a request is one pin: no value or name brings others with it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.questions import SMALL, problem_of


@pytest.mark.parametrize("pins", [{"tp": "2,pp=2"}, {"tp": "2 pp=2"}, {"tp=2,pp": 2}, {"tp=2": 8}, {"": 1}])
def test_a_pin_is_one_pin(api: httpx.Client, pins: dict[str, Any]) -> None:
    told = problem_of(api.post("/v1/plans", json={**SMALL, "pins": pins}), 422)
    assert told["errors"][0]["pointer"].startswith("/pins/")
