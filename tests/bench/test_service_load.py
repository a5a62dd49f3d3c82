"""How much one service carries on this machine: known plans by the second, and its answers while it is busy planning.

By hand on a quiet machine: ``python -m pytest tests/bench/test_service_load.py -m bench -s``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

from tests.postgres import postgres_server, postgres_url  # noqa: F401 - fixtures
from tests.service.processes import Member, questions

pytestmark = pytest.mark.bench

ANCHOR = {"model": "70b", "cluster": {"gpu": "h100", "gpus": 128}}


@pytest.fixture(params=["sqlite", "postgresql"])
def member(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Member]:
    """One service on each kind of database."""
    sqlite = request.param == "sqlite"
    database = f"sqlite:///{tmp_path}/plans.db" if sqlite else request.getfixturevalue("postgres_url")
    started = Member(tmp_path, request.param, database)
    yield started
    started.end()


def measured(url: str, rate: float, seconds: float, *body: str) -> dict[str, float]:
    """What a second process sees."""
    command = [sys.executable, "-m", "tests.bench.load", url, str(rate), str(seconds), *body]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def told(what: str, figures: dict[str, float]) -> None:
    print(f"{what} (load average {os.getloadavg()[0]:.1f}): " + ", ".join(f"{k} {v:,.1f}" for k, v in figures.items()))


def test_known_plans(member: Member) -> None:
    """200 requests a second for a plan that is known."""
    assert member.ask(ANCHOR, wait_s=60).json()["state"] == "succeeded"
    body = json.dumps(ANCHOR)
    measured(f"{member.url}/v1/plans", 50, 2, body)
    figures = measured(f"{member.url}/v1/plans", 220, 15, body)
    told("known plans", figures)
    assert not figures["failed"]
    assert figures["requests_per_s"] >= 200
    assert figures["p99_ms"] < 100


def test_health_while_planning(member: Member) -> None:
    """50 different plans are waited for, and the probes are answered."""
    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(member.ask, body, 60) for body in questions(50)]
        figures = measured(f"{member.url}/healthz", 50, 15)
        told("healthz beside 50 plans", figures)
        states = [each.result().json()["state"] for each in waiting]
    assert not figures["failed"]
    assert figures["p99_ms"] < 50
    assert set(states) <= {"succeeded", "running", "queued"}
