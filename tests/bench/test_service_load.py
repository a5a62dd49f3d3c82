"""How much one service carries on this machine: known plans by the second, and its answers while it is busy planning.

By hand on a quiet machine: ``python -m pytest tests/bench/test_service_load.py -m bench -s``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

from tests.service.conftest import place, postgres, sqlite  # noqa: F401 - fixtures
from tests.service.processes import Place, quick_question, until

pytestmark = pytest.mark.bench

ANCHOR = {"model": "70b", "cluster": {"gpu": "h100", "gpus": 128}}
IN_FLIGHT = 50


def measured(url: str, rate: float, seconds: float, *body: str) -> dict[str, float]:
    """What a second process sees."""
    command = [sys.executable, "-m", "tests.bench.load", url, str(rate), str(seconds), *body]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def told(what: str, figures: dict[str, float]) -> None:
    print(f"{what} (load average {os.getloadavg()[0]:.1f}): " + ", ".join(f"{k} {v:,.1f}" for k, v in figures.items()))


def test_known_plans(place: Place) -> None:  # noqa: F811
    """200 requests a second for a plan that is known."""
    service = place.serve()
    assert service.ask(ANCHOR, wait_s=60).json()["state"] == "succeeded"
    body = json.dumps(ANCHOR)
    measured(f"{service.url}/v1/plans", 50, 2, body)
    figures = measured(f"{service.url}/v1/plans", 220, 15, body)
    told(f"known plans, {place.kind}", figures)
    assert not figures["failed"]
    assert figures["requests_per_s"] >= 200
    assert figures["p99_ms"] < 100


def test_plans_that_others_look_at(place: Place) -> None:  # noqa: F811
    """The same for GET, which asks the database each time: whoever waits without `Prefer` does this."""
    service = place.serve()
    plan = service.ask(ANCHOR, wait_s=60).json()["id"]
    measured(f"{service.url}/v1/plans/{plan}", 50, 2)
    figures = measured(f"{service.url}/v1/plans/{plan}", 220, 15)
    told(f"plans by id, {place.kind}", figures)
    assert not figures["failed"]
    assert figures["requests_per_s"] >= 200
    assert figures["p99_ms"] < 100


def test_health_while_planning(place: Place) -> None:  # noqa: F811
    """50 different plans are waited for, and the probes are answered."""
    service = place.serve(longest_wait_s=120)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        waiting = [pool.submit(service.ask, quick_question(number), 80) for number in range(IN_FLIGHT)]
        until(lambda: len(service.listed()) == IN_FLIGHT, "they are not accepted")
        left = sum(plan["finished_at"] is None for plan in service.listed())
        figures = measured(f"{service.url}/healthz", 50, 15)
        told(f"healthz beside {left} plans in flight, {place.kind}", figures)
        states = [each.result().json()["state"] for each in waiting]
    assert not figures["failed"]
    assert figures["p99_ms"] < 50
    assert set(states) == {"succeeded"}
