"""Plans: answers at once and later, one id for one question, outcomes, pages, and what a client need not load again."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from planner_api.problems import FieldProblem
from planner_api.problems import problem as made_problem
from planner_api.routes.jobs import job
from planner_api.schemas.answers import State
from planner_api.storage.plans import PlanRow
from tests.api.conftest import in_process
from tests.api.questions import SMALL, plan, problem_of

NO_WAIT = {"Prefer": "wait=0"}
LONG = {"model": "llama3-405b", "cluster": {"gpu": "h100", "gpus": 4096}, "top": 50}


def fresh(seq_len: int) -> dict[str, Any]:
    """A question that nobody asked of this service."""
    return {**SMALL, "job": {"seq_len": seq_len}}


def test_a_plan_is_answered_when_it_is_there(api: httpx.Client) -> None:
    answer = api.post("/v1/plans", json=SMALL, headers=[("Prefer", "respond-async"), ("Prefer", "wait=60")])
    told = answer.json()
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "wait=60"
    assert answer.headers["content-location"] == told["links"]["self"] == f"/v1/plans/{told['id']}"
    assert (told["state"], told["outcome"], told["problem"]) == ("succeeded", "plan", None)
    assert told["created_at"] <= told["started_at"] <= told["finished_at"]
    assert told["result"] == api.get(told["links"]["result"]).json()
    assert told["result"]["id"] == told["id"]
    assert api.get(told["links"]["self"]).json() == told


@pytest.mark.parametrize("state", get_args(State))
def test_only_a_running_plan_tells_how_far_it_is(state: str) -> None:
    """What its search told last says nothing of one that has ended or waits again."""
    progress = '{"text": "searching megatron", "backend": "megatron", "candidates": 0, "solved": 0}'
    rest: dict[str, Any] = dict.fromkeys(field.name for field in fields(PlanRow))
    row = PlanRow(**{**rest, "id": "0" * 64, "state": state, "attempts": 1, "created_at": 0.0, "progress": progress})
    assert (job(row).progress is not None) == (state == "running")


def test_a_plan_that_takes_longer_is_looked_for(api: httpx.Client) -> None:
    answer = api.post("/v1/plans", json=fresh(1024), headers=NO_WAIT)
    assert answer.status_code == 202
    assert answer.json()["state"] in ("queued", "running")
    assert int(answer.headers["retry-after"]) >= 1
    place = answer.headers["location"]
    early = api.get(f"{place}/result")
    if early.status_code != 200:
        assert problem_of(early, 409)["type"] == "urn:planner:problem:not-ready"
        assert early.headers["retry-after"]
    assert plan(api, fresh(1024))["links"]["self"] == place


@pytest.mark.parametrize(
    "other",
    [
        {**SMALL, "cluster": {"gpus": 8, "gpu": "h100"}},
        {**SMALL, "cluster": {"gpu": "h100", "nodes": 1}},
        {**SMALL, "job": {}, "pins": {}, "profile": None, "time_limit_s": None},
    ],
)
def test_one_question_has_one_id(api: httpx.Client, other: dict[str, Any]) -> None:
    assert plan(api, other)["id"] == plan(api, SMALL)["id"]


@pytest.mark.parametrize("change", [{"top": 3}, {"pins": {"tp": 2}}, {"cluster": {"gpu": "h100", "gpus": 16}}])
def test_another_question_has_another_id(api: httpx.Client, change: dict[str, Any]) -> None:
    assert plan(api, {**SMALL, **change})["id"] != plan(api, SMALL)["id"]


def test_a_question_without_a_plan_is_answered_with_reasons(api: httpx.Client) -> None:
    told = plan(api, {"model": "405b", "cluster": {"gpu": "a100-40gb", "gpus": 1}})
    assert (told["state"], told["outcome"], told["result"]) == ("succeeded", "infeasible", None)
    assert told["problem"]["type"] == "urn:planner:problem:no-plan-fits"
    assert told["problem"]["details"]
    assert "--" not in str(told["problem"])
    assert_own_problem(api, told)


def test_a_plan_that_ended_without_a_document_tells_why(api: httpx.Client) -> None:
    told = plan(api, {**SMALL, "backend": "fsdp", "pins": {"pp": 2}})
    assert told["outcome"] == "refused"
    assert_own_problem(api, told)


@pytest.mark.parametrize(
    ("state", "outcome", "code"), [("succeeded", "time-limit", "time-limit"), ("failed", None, "out-of-memory")]
)
def test_problems_of_a_plan_stay_what_they_are(tmp_path: Path, state: str, outcome: str | None, code: str) -> None:
    told = made_problem(code, "why", hint="what to do", errors=[FieldProblem(pointer="/pins", detail="this")])

    async def ask() -> None:
        async with in_process(tmp_path, workers=0) as (client, app):
            plans, name = app.state.services.plans, "0" * 64
            await plans.accept(name, "{}", 10, 1.0)
            await plans.claim(name, "worker", 1.0)
            assert await plans.finish(name, "worker", state, outcome=outcome, problem=told.model_dump_json())
            for place in ("result", "artifacts"):
                answer = await client.get(f"/v1/plans/{name}/{place}")
                assert problem_of(answer, told.status) == {
                    **told.model_dump(mode="json", exclude_none=True),
                    "instance": answer.json()["instance"],
                }

    asyncio.run(ask())


def assert_own_problem(api: httpx.Client, told: dict[str, Any]) -> None:
    """What a plan has instead of a document is answered in its place, whole."""
    for place in ("result", "artifacts"):
        answer = problem_of(api.get(told["links"][place]), told["problem"]["status"])
        assert {**told["problem"], **answer, "instance": None} == told["problem"]


def test_a_plan_is_cancelled_and_asked_for_again(api: httpx.Client) -> None:
    place = api.post("/v1/plans", json=LONG, headers=NO_WAIT).headers.get("location")
    assert place is not None
    assert api.delete(place).status_code == 200
    told = api.get(place).json()
    ends = time.monotonic() + 60
    while told["state"] in ("queued", "running") and time.monotonic() < ends:
        time.sleep(0.05)
        told = api.get(place).json()
    assert told["state"] in ("cancelled", "succeeded")
    if told["state"] == "cancelled":
        assert problem_of(api.get(f"{place}/result"), 409)["detail"]
    assert api.delete(place).json()["state"] == told["state"]


def test_what_has_not_changed_is_not_sent_again(api: httpx.Client) -> None:
    links = plan(api, SMALL)["links"]
    for place in (links["self"], links["result"]):
        etag = api.get(place).headers["etag"]
        for given in (etag, f'"other", {etag}', f"W/{etag}", "*"):
            again = api.get(place, headers={"If-None-Match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert api.get(place, headers={"If-None-Match": '"other"'}).status_code == 200


def test_pages_hold_every_plan_once(api: httpx.Client) -> None:
    ids = {plan(api, fresh(seq_len))["id"] for seq_len in (256, 512, 768)}
    place: str | None = "/v1/plans?limit=1"
    seen: list[str] = []
    while place is not None:
        answer = api.get(place)
        page = answer.json()
        seen += [row["id"] for row in page["plans"]]
        assert all(row["result"] is None for row in page["plans"])
        place = page["next"]
        assert answer.headers.get("link") == (f'<{place}>; rel="next"' if place else None)
    assert len(seen) == len(set(seen))
    assert ids <= set(seen)


@pytest.mark.parametrize("after", ["x", "%00", "bmFuIHg", "MS4wIAA", "é"])
def test_a_place_in_no_list_is_refused(api: httpx.Client, after: str) -> None:
    for resource in ("plans", "measurements"):
        told = problem_of(api.get(f"/v1/{resource}?after={after}"), 422)
        assert told["errors"][0]["pointer"] == "after"


def test_unknown_plans_are_not_found(api: httpx.Client) -> None:
    place = "/v1/plans/" + "0" * 64
    for method, path in [("GET", ""), ("GET", "/result"), ("GET", "/artifacts"), ("DELETE", "")]:
        assert problem_of(api.request(method, place + path), 404)["detail"]


def test_a_request_that_is_sent_again_is_the_same(api: httpx.Client) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    first = plan(api, SMALL, **key)
    assert plan(api, SMALL, **key) == first
    other = api.post("/v1/plans", json={**SMALL, "top": 1}, headers=key)
    assert problem_of(other, 422)["type"] == "urn:planner:problem:key-reused"


def test_a_refused_request_frees_its_key(api: httpx.Client) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    problem_of(api.post("/v1/plans", json={**SMALL, "model": "no-such-model"}, headers=key), 422)
    assert plan(api, SMALL, **key)["outcome"] == "plan"
