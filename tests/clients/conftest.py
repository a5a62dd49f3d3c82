"""The service that the clients' tests talk to, and a clean environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.conftest import cli  # noqa: F401 - the same fixture
from tests.clients.running import running_service
from tests.clients.stand_in import Behaviour, serving


@pytest.fixture(autouse=True)
def _no_service_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLANNER_URL", "PLANNER_TOKEN", "PLANNER_ALLOW_PLAIN_HTTP", "FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def behaviour() -> Behaviour:
    """How the stand-in treats its clients; a test may change it."""
    return Behaviour()


@pytest.fixture
def stand_in(behaviour: Behaviour) -> Iterator[str]:
    """Address of a server that can be told to be slow, busy or odd."""
    with serving(behaviour) as url:
        yield url


@pytest.fixture(scope="session")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the service itself, one for all tests of a process."""
    pytest.importorskip("fastapi", reason="the service needs the extra api")
    with running_service(tmp_path_factory.mktemp("service")) as url:
        yield url
