"""The services that the tests of the API ask: two of a worker in processes of their own, and one in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

import httpx

from tests.clients.running import running_service


@dataclass(frozen=True)
class Running:
    """A service, where it keeps its data, and what it logged."""

    url: str
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "service.log").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _no_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PLANNER_") and "PYTHON" not in name]:
        if name != "PLANNER_CLIENT_GENERATOR":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """``planner serve`` without tokens; limits of time are short."""
    folder = tmp_path_factory.mktemp("service")
    settings = {
        "PLANNER_RATE_LIMIT": "",
        "PLANNER_SOLVE_TIME_LIMIT_S": "60",
        "PLANNER_HEADER_TIMEOUT_S": "2",
        "PLANNER_BODY_TIMEOUT_S": "2",
    }
    with running_service(folder, **settings) as url:
        yield Running(url, folder)


@pytest.fixture
def api(service: Running) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        yield client


@asynccontextmanager
async def in_process(folder: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of an app in this process, and the app, whose services have started."""
    from planner_api.app import create_app
    from planner_api.settings import Settings

    values = {"database_url": f"sqlite:///{folder}/plans.db", "rate_limit": "", **settings}
    app = create_app(Settings(**values))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client, app
