"""Places to run services in: an SQLite file, an empty PostgreSQL database, or both in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

from tests.service.processes import Place


def _closed(place: Place) -> Iterator[Place]:
    try:
        yield place
    finally:
        place.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Place]:
    """A database of one process."""
    yield from _closed(Place(f"sqlite:///{tmp_path}/planner.db", tmp_path))


@pytest.fixture
def postgres(tmp_path: Path, postgres_url: str) -> Iterator[Place]:
    """A database of several processes."""
    yield from _closed(Place(postgres_url.replace("+psycopg", ""), tmp_path))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    """Either."""
    found: Place = request.getfixturevalue(request.param)
    return found
