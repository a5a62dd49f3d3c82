"""Errors of the library in the words of the API: fields for options, routes for commands, and nothing of a framework's
own options changed."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from planner_api.wording import ABOUT_MACHINES_AND_JOB, in_fields, pointers_of
from tests.api.questions import SMALL, problem_of

COMMANDS = re.compile(r"--[a-z]|`planner (?!validate|tokens)|\bplanner (suggest|estimate|check|models|gpus)\b")
ESTIMATE: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "top"}
CHECK: dict[str, Any] = {
    "files": {"ds_config.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}'},
    "model": "8b",
    "cluster": {"gpu": "h100", "gpus": 8},
}
TINY = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 1024, "vocab": 1000}
OWN = {**TINY, "max_seq": 4096}
MOE = {"experts": 4, "top_k": 8, "expert_ffn": 64}
RUN = {"id": "a", "model": {"name": "x"}, "hardware": {"gpu": "h100"}, "run": {}, "measured": {"step_time_s": 1}}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("use --gpus 8 or --gpus 16, or say --gpus-per-node", "use cluster.gpus = 8 or cluster.gpus = 16, or say {}"),
        ("a plan fits with --gpus 32 --global-batch 64", "a plan fits with cluster.gpus = 32, job.global_batch = 64"),
        ("narrow the search with --backend and --pin", "narrow the search with backend and pins"),
        ("--pin tp=4,recompute=full.", "pins.tp = 4, pins.recompute = full."),
        ("`planner backends megatron --rules` lists them", "/v1/catalog/backends lists them"),
        ("let `planner suggest --backend fsdp` choose", "let POST /v1/plans with backend = fsdp choose"),
        ("`planner estimate --model a --tp 4` does", "POST /v1/estimates with model = a, strategy.tp = 4 does"),
        ("--recompute-granularity full --model.name x", "--recompute-granularity full --model.name x"),
        ("--no-such-option 3", "--no-such-option 3"),
    ],
)
def test_options_become_fields(said: str, told: str) -> None:
    assert in_fields(said) == told.format("cluster.gpus_per_node")


def test_options_that_frameworks_have_too_stay() -> None:
    told = in_fields("add --sequence-parallel, or --gpus 16", options=ABOUT_MACHINES_AND_JOB)
    assert told == "add --sequence-parallel, or cluster.gpus = 16"


@pytest.mark.parametrize(
    ("where", "pointers"),
    [
        ("--tp, --pp, --cp", ("/strategy/tp", "/strategy/pp", "/strategy/cp")),
        ("--pin tp", ("/pins/tp",)),
        ("pins.recompute", ("/pins/recompute",)),
        ("megatron", ("/strategy",)),
        ("pins.tp, pins.pp", ("/pins/tp", "/pins/pp")),
        ("model.dimensions: layers, moe.top_k", ("/model/dimensions/layers", "/model/dimensions/moe/top_k")),
        ("a/b.json:3", ("/files/a~1b.json",)),
        ("model.config: hidden_size", ("/model/config/hidden_size",)),
        ("somewhere else", ()),
    ],
)
def test_places_become_pointers(where: str, pointers: tuple[str, ...]) -> None:
    assert pointers_of(where, ["a/b.json"]) == pointers


@pytest.mark.parametrize(
    ("route", "base", "changes", "pointer"),
    [
        ("plans", SMALL, {"model": 5}, "/model"),
        ("plans", SMALL, {"model": {}}, "/model/config"),
        ("plans", SMALL, {"model": "no-such-model"}, "/model"),
        ("plans", SMALL, {"model": "a\nb"}, "/model"),
        ("plans", SMALL, {"model": {"config": {"model_type": "t5"}}}, "/model/config"),
        ("plans", SMALL, {"model": {"config": {"model_type": "llama"}}}, "/model/config/hidden_size"),
        ("plans", SMALL, {"model": {"dimensions": {**TINY, "layers": 0}}}, "/model/dimensions/layers"),
        ("plans", SMALL, {"cluster": {}}, "/cluster/gpu"),
        ("plans", SMALL, {"cluster": {"gpu": "h100"}}, "/cluster/gpus"),
        ("plans", SMALL, {"cluster": {"gpu": "h1000", "gpus": 8}}, "/cluster/gpu"),
        ("plans", SMALL, {"cluster": {"gpu": "h100", "gpus": 9}}, "/cluster/gpus"),
        ("plans", SMALL, {"cluster": {"gpu": "h100", "gpus": 8, "nodes": 3}}, "/cluster/nodes"),
        ("plans", SMALL, {"cluster": {"system": "x", "gpus": 8}}, "/cluster/system"),
        ("plans", SMALL, {"cluster": {"gpu": "h100", "gpus": 8, "nic_gbps": 0}}, "/cluster/nic_gbps"),
        ("plans", SMALL, {"job": {"seq_len": 0}}, "/job/seq_len"),
        ("plans", SMALL, {"job": {"global_batch": "4x"}}, "/job/global_batch"),
        ("plans", SMALL, {"job": {"precision": "int3"}}, "/job/precision"),
        ("plans", SMALL, {"job": {"loss": "x"}}, "/job/loss"),
        ("plans", SMALL, {"job": {"objective": "x"}}, "/job/objective"),
        ("plans", SMALL, {"job": {"memory_margin": 0.99}}, "/job/memory_margin"),
        ("plans", SMALL, {"job": {"flash_attention": "no"}}, "/job/flash_attention"),
        ("plans", SMALL, {"backend": "megatro"}, "/backend"),
        ("plans", SMALL, {"pins": {"x": 1}}, "/pins/x"),
        ("plans", SMALL, {"pins": {"zero-stagee": 1}}, "/pins/zero-stagee"),
        ("plans", SMALL, {"pins": {"tp": ""}}, "/pins/tp"),
        ("plans", SMALL, {"pins": {"tp": 10**20}}, "/pins/tp"),
        ("plans", SMALL, {"model": {"config": {}}}, "/model/config"),
        ("plans", SMALL, {"model": {"config": {"a": 1}, "dimensions": {"a": 1}}}, "/model/config"),
        ("plans", SMALL, {"model": {"dimensions": {**OWN, "heads": 5, "kv_heads": 2}}}, "/model/dimensions/heads"),
        ("plans", SMALL, {"model": {"dimensions": {**OWN, "layers": "24"}}}, "/model/dimensions/layers"),
        ("plans", SMALL, {"model": {"dimensions": {**OWN, "moe": MOE}}}, "/model/dimensions/moe/top_k"),
        (
            "plans",
            SMALL,
            {"model": {"config": {"model_type": "llama", "hidden_size": "1"}}},
            "/model/config/hidden_size",
        ),
        ("plans", SMALL, {"pins": {"tp": "x"}}, "/pins/tp"),
        ("plans", SMALL, {"top": 0}, "/top"),
        ("plans", SMALL, {"time_limit_s": 0}, "/time_limit_s"),
        ("plans", SMALL, {"profile": {}}, "/profile/planner_version"),
        ("plans", SMALL, {"profile": "measurements", "cluster": {"gpu": "v100", "gpus": 8}}, "/profile"),
        ("plans", SMALL, {"profile": "measurements", "cluster": {"gpus": 8}}, "/cluster/gpu"),
        ("estimates", {}, {"model": "no", "profile": "measurements", "cluster": {"gpu": "v100", "gpus": 8}}, "/model"),
        ("plans", SMALL, {"a/b~c": 1}, "/a~1b~0c"),
        ("estimates", ESTIMATE, {"strategy": {"tp": 3}}, "/strategy/tp"),
        ("estimates", ESTIMATE, {"strategy": {"zero_stage": 3}}, "/strategy/zero_stage"),
        ("estimates", ESTIMATE, {"strategy": {"layers_per_stage": []}}, "/strategy/layers_per_stage"),
        ("estimates", ESTIMATE, {"strategy": {"schedule": "x"}}, "/strategy/schedule"),
        ("estimates", ESTIMATE, {"strategy": {"recompute": "x"}}, "/strategy/recompute"),
        ("estimates", ESTIMATE, {"strategy": {"offload": "cpu:3"}}, "/strategy/offload"),
        ("estimates", ESTIMATE, {"strategy": {"layers_per_stage": [1, 2]}}, "/strategy/layers_per_stage"),
        ("estimates", ESTIMATE, {"backend": "auto"}, "/backend"),
        ("checks", CHECK, {"files": {"a/b.json": "{"}}, "/files/a~1b.json"),
        ("checks", CHECK, {"files": {"x.txt": "hi"}}, "/files/x.txt"),
        ("checks", CHECK, {"files": {}}, "/files"),
        ("checks", CHECK, {"format": "x"}, "/format"),
        ("checks", CHECK, {"recompute": "x"}, "/recompute"),
        ("checks", CHECK, {"cluster": {"gpu": "h100", "gpus": 8, "nodes": 3}}, "/cluster/nodes"),
        ("measurements", {}, {"records": []}, "/records"),
        ("measurements", {}, {"records": [RUN, {}]}, "/records/1/id"),
        ("measurements", {}, {"records": [{**RUN, "run": {"tp": 0}}]}, "/records/0/run/tp"),
        ("measurements", {}, {"records": [{**RUN, "hardware": {"gpu": "x"}}]}, "/records/0/hardware/gpu"),
        ("measurements", {}, {"records": [{**RUN, "hardware": {}}]}, "/records/0/hardware/gpu"),
        ("measurements", {}, {"records": [{**RUN, "measured": {}}]}, "/records/0/measured/step_time_s"),
    ],
)
def test_problems_point_at_fields(
    api: httpx.Client, route: str, base: dict[str, Any], changes: dict[str, Any], pointer: str
) -> None:
    """Every wrong value is told with its place in the body, and with what to do in terms of the body."""
    told = problem_of(api.post(f"/v1/{route}", json={**base, **changes}), 422)
    assert told["errors"][0]["pointer"] == pointer
    assert len({error["pointer"] for error in told["errors"]}) == len(told["errors"])
    assert told["hint"]
    assert not COMMANDS.search(str(told)), told
    assert " above" not in str(told)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/plans/x", "plan"),
        ("/v1/plans?limit=0", "limit"),
        ("/v1/plans?after=x", "after"),
        ("/v1/catalog/models?after=x", "after"),
        (f"/v1/plans/{'0' * 64}/artifacts?rank=0", "rank"),
        (f"/v1/plans/{'0' * 64}/artifacts?launcher=x", "launcher"),
        (f"/v1/plans/{'0' * 64}/artifacts?launcher=slurm&launcher=mpirun", "launcher"),
        (f"/v1/plans/{'0' * 64}?wait=1", "wait"),
        ("/v1/plans?state=queued", "state"),
        ("/v1/catalog/gpus?txt=h100", "txt"),
    ],
)
def test_parameters_are_named(api: httpx.Client, path: str, name: str) -> None:
    told = problem_of(api.get(path), 422)
    assert told["errors"][0]["pointer"] == name
    assert told["hint"]


def test_all_missing_dimensions_are_told_at_once(api: httpx.Client) -> None:
    given = {"layers": 2, "hidden": 256}
    told = problem_of(api.post("/v1/plans", json={**SMALL, "model": {"dimensions": given}}), 422)
    missing = ("ffn", "heads", "kv_heads", "head_dim", "vocab", "max_seq")
    assert [error["pointer"] for error in told["errors"]] == [f"/model/dimensions/{name}" for name in missing]
    assert told["allowed"].startswith(f"required: {', '.join((*given, *missing))}; optional: activation")


@pytest.mark.parametrize(
    ("route", "changes", "hint", "allowed"),
    [
        ("checks", {"files": {"x.txt": "hi"}}, "name it in the field format", "deepspeed-json (DeepSpeed"),
        ("plans", {"cluster": {"system": "meta-grand", "gpus": 8}}, "did you mean meta-grand-teton?", "aws-p4d, "),
        ("plans", {"cluster": {"system": "x", "gpus": 8}}, "use one of the allowed names", "meta-grand-teton"),
        ("plans", {"job": {"global_batch": "1000M", "seq_len": 7}}, "job.global_batch = 100000000 ", "7 tokens"),
        ("plans", {"pins": {"tp": 10**20}}, "pins.tp = 8", "from 1 to 1000000"),
        ("plans", {"job": {"loss": "zzz"}}, "choose one of the allowed values for job.loss", "eager"),
        ("plans", {"model": {"dimensions": {**OWN, "layers": -1}}}, "layers must be greater than 0", "greater than 0"),
    ],
)
def test_hints_can_be_followed(api: httpx.Client, route: str, changes: dict[str, Any], hint: str, allowed: str) -> None:
    """What a hint names is among what is allowed, and is taken."""
    base = SMALL if route == "plans" else CHECK
    told = problem_of(api.post(f"/v1/{route}", json={**base, **changes}), 422)
    assert hint in told["hint"]
    assert allowed in told["allowed"]


@pytest.mark.parametrize(
    "body",
    [
        {**CHECK, "cluster": {}},
        {**CHECK, "model": None, "cluster": {}},
        {**CHECK, "model": "70b", "cluster": {"gpu": "l4", "gpus": 1}, "suggest": True},
    ],
    ids=["no machines", "no model", "does not fit"],
)
def test_reports_say_what_to_give_in_fields(api: httpx.Client, body: dict[str, Any]) -> None:
    report = api.post("/v1/checks", json=body).json()
    assert report["warnings"]
    assert not COMMANDS.search(str(report["warnings"])), report["warnings"]
