"""The committed description of the API is the one that the service gives, and clients can rely on its names."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from planner_api.openapi_file import text

COMMITTED = Path(__file__).parents[2] / "api" / "openapi.json"
OPERATIONS = {
    *("plans-create", "plans-listed", "plans-look", "plans-result", "plans-cancel"),
    *("artifacts-listed", "artifacts-archive", "artifacts-one"),
    *("estimates-create", "checks-create"),
    *("measurements-create", "measurements-listed", "measurements-remove"),
    *("catalog-models", "catalog-gpus", "catalog-backends"),
    *("health-alive", "health-ready", "health-metrics"),
}


def test_the_committed_description_is_current(api: httpx.Client) -> None:
    assert COMMITTED.read_text(encoding="utf-8") == text(), "run `make openapi`"
    assert api.get("/openapi.json").json() == json.loads(text())


def test_operations_keep_their_names() -> None:
    paths = json.loads(text())["paths"]
    assert {operation["operationId"] for path in paths.values() for operation in path.values()} == OPERATIONS


def test_every_field_is_described() -> None:
    """Hints send people here."""
    schemas = json.loads(text())["components"]["schemas"]
    bare = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, told in schema.get("properties", {}).items()
        if not told.get("description")
    ]
    assert bare == []


def test_what_needs_a_token_says_so() -> None:
    paths = json.loads(text())["paths"]
    open_to_all = {path for path, operations in paths.items() for each in operations.values() if "security" not in each}
    assert open_to_all == {"/healthz", "/readyz"}


def test_bodies_of_the_description_are_answered(api: httpx.Client) -> None:
    paths = json.loads(text())["paths"]
    tried = 0
    for path, operations in paths.items():
        for method, operation in operations.items():
            example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            if example is not None:
                answer = api.request(method, path, json=example)
                assert answer.status_code in (200, 201, 202), (path, answer.text[:500])
                tried += 1
    assert tried == 3
