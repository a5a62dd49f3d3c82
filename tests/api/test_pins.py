"""A pin of a request is one pin: no value or name brings others with it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.questions import SMALL, plan, problem_of

QUESTION = {"model": "llama3-8b", "cluster": {"gpu": "h100", "gpus": 16}}


@pytest.mark.parametrize("pins", [{"tp": "2,pp=2"}, {"tp": "2 pp=2"}, {"tp=2,pp": 2}, {"tp=2": 8}, {"": 1}])
def test_a_pin_is_one_pin(api: httpx.Client, pins: dict[str, Any]) -> None:
    told = problem_of(api.post("/v1/plans", json={**SMALL, "pins": pins}), 422)
    assert told["errors"][0]["pointer"].startswith("/pins/")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"pins": {"tp": 3}}, "/pins/tp"),
        ({"pins": {"dp": 5}}, "/pins/dp"),
        ({"pins": {"tp": 16, "pp": 2}}, "/pins/tp"),
        ({"pins": {"etp": 2}}, "/pins/etp"),
        ({"pins": {"ep": 2}}, "/pins/ep"),
        ({"pins": {"sequence_parallel": True, "tp": 1}}, "/pins/sequence_parallel"),
        ({"pins": {"recompute": "half"}}, "/pins/recompute"),
        ({"pins": {"micro_batch": 1000}}, "/pins/micro_batch"),
        ({"pins": {"offload": "nvme"}, "backend": "megatron"}, "/pins/offload"),
        ({"pins": {"tp": 3}, "job": {"objective": "cost"}}, "/pins/tp"),
        ({"cluster": {"gpu": "h20", "gpus": 16}, "job": {"objective": "cost"}}, "/job/objective"),
    ],
)
def test_what_no_search_can_answer_is_refused_at_once(api: httpx.Client, change: dict[str, Any], pointer: str) -> None:
    """Nothing waits in the queue that has no answer whatever the search finds."""
    told = problem_of(api.post("/v1/plans", json={**QUESTION, **change}), 422)
    assert (told["type"], told["errors"][0]["pointer"]) == ("urn:planner:problem:bad-input", pointer)
    assert told["hint"]


def test_pins_that_the_rules_refuse_are_an_outcome(api: httpx.Client) -> None:
    """That takes a search; it is not the service that failed, and asked again it is not searched again."""
    body = {**QUESTION, "backend": "fsdp", "pins": {"pp": 2}}
    told = plan(api, body)
    assert (told["state"], told["outcome"], told["result"]) == ("succeeded", "refused", None)
    assert told["problem"]["type"] == "urn:planner:problem:bad-input"
    assert told["problem"]["errors"][0]["pointer"].startswith("/pins")
    assert told["problem"]["hint"]
    assert plan(api, body) == told
    assert 'planner_plans_total{outcome="failed"}' not in api.get("/metrics").text


def test_a_cheaper_part_of_the_cluster_keeps_the_pins(api: httpx.Client) -> None:
    """Parts of the cluster that cannot have the pins are left out."""
    told = plan(api, {**QUESTION, "backend": "fsdp", "pins": {"dp": 16}, "job": {"objective": "cost"}, "top": 1})
    assert told["outcome"] == "plan"
    assert told["result"]["best"]["strategy"]["dp"] == 16
