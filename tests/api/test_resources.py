"""Estimates, checks, measurements, the catalogue and the state of the service, beside the library's own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from planner import service as library
from planner.service import CheckRequest, ClusterInput, JobInput, StrategyInput
from tests.accuracy_records import record
from tests.api.questions import SMALL, plan, problem_of

MACHINES = ClusterInput(gpu="h100", gpus=8)
STRATEGIES: dict[str, dict[str, Any]] = {
    "usual": {},
    "every degree": {"tp": 2, "pp": 2, "vpp": 2, "micro_batch": 1, "sequence_parallel": True, "zero_stage": 1},
    "stages": {"pp": 2, "layers_per_stage": [9, 7], "recompute": "full:2", "schedule": "1f1b"},
    "shards": {"zero_stage": 1, "shard_degree": 4, "recompute": "selective"},
}
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
}


def as_json(document: Any) -> Any:
    return json.loads(json.dumps(document.to_json_dict()))


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_estimate_is_the_library_s(api: httpx.Client, name: str) -> None:
    given = STRATEGIES[name]
    job: dict[str, Any] = {
        "seq_len": 2048,
        "global_batch": 64,
        "precision": "bf16",
        "loss": "fused",
        "memory_margin": 0.05,
    }
    answer = api.post(
        "/v1/estimates",
        json={"model": "1b", "cluster": {"gpu": "h100", "gpus": 8}, "job": job, "strategy": given},
    )
    assert answer.status_code == 200, answer.text
    stages = {"layers_per_stage": "9,7"} if "layers_per_stage" in given else {}
    expected = library.estimate("1b", MACHINES, JobInput(**job), StrategyInput(**{**given, **stages}))
    assert answer.json() == as_json(expected)


def test_every_field_of_the_library_is_reachable() -> None:
    """What the command line can ask, a body can ask, too."""
    from planner.service import PlanRequest
    from planner_api.schemas.questions import CheckBody, JobBody, PlanBody, StrategyBody

    def fields(kind: type) -> set[str]:
        return set(kind.__dataclass_fields__)  # type: ignore[attr-defined]

    assert fields(StrategyInput) == set(StrategyBody.model_fields)
    assert fields(JobInput) == set(JobBody.model_fields)
    assert fields(PlanRequest) == set(PlanBody.model_fields)
    # The name of the format is called so here, files are texts, and a profile belongs to plans.
    assert fields(CheckRequest) - {"paths", "texts", "reader", "profile"} == set(CheckBody.model_fields) - {
        "files",
        "format",
    }


@pytest.mark.parametrize("suggest", [False, True])
def test_a_check_is_the_library_s(api: httpx.Client, tmp_path: Path, suggest: bool) -> None:
    """Of files on disk and of their texts."""
    files = {"ds_config.json": json.dumps(DEEPSPEED), "hostfile": "a slots=8\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    answer = api.post(
        "/v1/checks",
        json={"files": files, "model": "8b", "cluster": {"gpu": "h100"}, "suggest": suggest},
    )
    assert answer.status_code == 200, answer.text
    asked = CheckRequest(
        paths=tuple(tmp_path / name for name in files), model="8b", cluster=ClusterInput(gpu="h100"), suggest=suggest
    )
    expected = as_json(library.check(asked))
    assert answer.json() == expected
    assert expected.get("plan") is not None
    assert (expected.get("suggested") is not None) == suggest


def test_measurements_change_plans_that_ask_for_them(api: httpx.Client) -> None:
    """Records of an accelerator are fitted to when a plan asks for measurements, and only then."""
    body = {"model": "8b", "cluster": {"gpu": "h100", "gpus": 16}, "backend": "megatron", "top": 1}
    usual = plan(api, body)
    problem_of(api.post("/v1/plans", json={**body, "profile": "measurements"}), 422)
    slow = [
        record(f"ours/{batch}", measured__step_time_s=seconds, run__global_batch=batch)
        for batch, seconds in ((64, 4.6), (128, 9.0), (256, 17.8))
    ]
    answer = api.post("/v1/measurements", json={"records": slow})
    assert answer.status_code == 201, answer.text
    assert (len(answer.json()["accepted"]), answer.json()["known"]) == (3, [])
    again = api.post("/v1/measurements", json={"records": slow[:1]}).json()
    assert (again["accepted"], again["known"]) == ([], answer.json()["accepted"][:1])
    fitted = plan(api, {**body, "profile": "measurements"})
    assert fitted["id"] != usual["id"]
    assert fitted["result"]["request"]["profile"]["framework"]
    assert fitted["result"]["best"]["estimate"]["step_time_s"] > usual["result"]["best"]["estimate"]["step_time_s"]
    assert plan(api, body)["id"] == usual["id"]
    seen: list[str] = []
    place: str | None = "/v1/measurements?limit=2"
    while place is not None:
        page = api.get(place).json()
        seen += [item["id"] for item in page["items"]]
        place = page["next"]
    assert sorted(seen) == sorted(answer.json()["accepted"])
    for identifier in seen:
        assert api.delete(f"/v1/measurements/{identifier}").status_code == 204
    problem_of(api.delete(f"/v1/measurements/{seen[0]}"), 404)


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [
        ({"hardware__gpu": "x"}, "/records/1/hardware/gpu"),
        ({"measured__step_time_s": 1e-300}, "/records/1/measured/step_time_s"),
        ({"measured__step_time_s": 0.5}, "/records/1/measured/step_time_s"),
        ({"measured__step_time_s": 1e9}, "/records/1"),
        ({"measured__peak_mem_gib": 200.0}, "/records/1/measured/peak_mem_gib"),
        ({"model__seq_len": None}, "/records/1"),
        ({"run__global_batch": None}, "/records/1"),
    ],
)
def test_measurements_are_taken_all_or_none(api: httpx.Client, wrong: dict[str, Any], pointer: str) -> None:
    """What no profile can be fitted to would spoil those of everybody else."""
    before = api.get("/v1/measurements").json()
    records = [record("other/1"), record("other/2", **wrong)]
    told = problem_of(api.post("/v1/measurements", json={"records": records}), 422)
    assert told["errors"][0]["pointer"] == pointer
    assert told["hint"]
    assert api.get("/v1/measurements").json() == before


def test_measurements_that_contradict_each_other_are_named_by_their_ids(api: httpx.Client) -> None:
    """By those under which they are kept, and can be removed: their own may be the same."""
    slow = [record("ours/1", measured__step_time_s=seconds) for seconds in (3.0, 4.5)]
    kept = api.post("/v1/measurements", json={"records": slow}).json()["accepted"]
    body = {"model": "8b", "cluster": {"gpu": "h100", "gpus": 16}, "backend": "megatron", "profile": "measurements"}
    told = problem_of(api.post("/v1/plans", json=body), 422)
    for identifier in kept:
        assert identifier in told["detail"]
        assert api.delete(f"/v1/measurements/{identifier}").status_code == 204


@pytest.mark.parametrize(
    ("kind", "listing"),
    [("models", library.list_models), ("gpus", library.list_gpus), ("backends", library.list_backends)],
)
def test_pages_of_the_catalogue(api: httpx.Client, kind: str, listing: Any) -> None:
    expected = json.loads(json.dumps(listing("")))
    items: list[Any] = []
    place: str | None = f"/v1/catalog/{kind}?limit=7"
    while place is not None:
        answer = api.get(place)
        page = answer.json()
        assert page["total"] == len(expected)
        assert len(page["items"]) <= 7
        assert api.get(place, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
        items += page["items"]
        place = page["next"]
    assert items == expected


def test_the_catalogue_is_searched(api: httpx.Client) -> None:
    found = api.get("/v1/catalog/models", params={"text": "Mixtral"}).json()["items"]
    assert found
    assert all("mixtral" in json.dumps(item).lower() for item in found)
    assert api.get("/v1/catalog/gpus", params={"text": "no such thing"}).json() == {
        "items": [],
        "total": 0,
        "next": None,
    }


def numbers(api: httpx.Client) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_numbers_move_and_name_nobody(api: httpx.Client) -> None:
    """A plan and its requests are counted; whatever a client sends is no label."""
    body = {**SMALL, "job": {"seq_len": 384}}
    before = numbers(api)
    plan(api, body)
    for odd in ("/no-such-place", "/v1/plans/" + "e" * 64, "/v1/catalog/models?text=odd", "/%00"):
        api.get(odd)
    api.request("ODD", "/v1/plans")
    after = numbers(api)
    counted = 'planner_plans_total{outcome="plan"}'
    assert after[counted] == before.get(counted, 0) + 1
    # The same of the database, in which other processes' plans stand, too.
    kept = 'planner_plans_ended{outcome="plan"}'
    assert after[kept] == before.get(kept, 0) + 1
    posted = 'planner_http_requests_total{method="POST",route="/v1/plans",status="200"}'
    assert after[posted] > before.get(posted, 0)
    assert after["planner_queue_depth"] >= 0
    # A second round of odd requests makes no new series.
    for odd in ("/no-such-other", "/v1/plans/" + "f" * 64, "/v1/catalog/models?text=other"):
        api.get(odd)
    api.request("OTHER", "/v1/plans")
    assert set(numbers(api)) == set(after)
    assert not [name for name in after if "odd" in name.lower() or "e" * 64 in name]


def test_the_state_is_told(api: httpx.Client) -> None:
    alive, ready = api.get("/healthz"), api.get("/readyz")
    assert alive.json()["status"] == "ok"
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert set(ready.json()["checks"].values()) == {"ok"}
    assert alive.headers["cache-control"] == ready.headers["cache-control"] == "no-store"
