"""Questions that are answered quickly, and looks at answers that many tests share."""

from __future__ import annotations

from typing import Any

import httpx

PROBLEM = "application/problem+json"
SMALL: dict[str, Any] = {"model": "1b", "cluster": {"gpu": "h100", "gpus": 8}, "backend": "megatron", "top": 2}


def plan(client: httpx.Client, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The finished plan of a question."""
    answer = client.post("/v1/plans", json=body, headers={"Prefer": "wait=60", **headers})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def problem_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem that was answered, whole and with the request's id."""
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    assert answer.headers["content-type"] == PROBLEM
    told: dict[str, Any] = answer.json()
    assert told["status"] == status
    assert told["type"].startswith("urn:planner:problem:")
    assert told["title"]
    assert told["detail"]
    assert told["instance"] == f"urn:planner:request:{answer.headers['x-request-id']}"
    return told
