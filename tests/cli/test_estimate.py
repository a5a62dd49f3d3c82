"""``planner estimate``: the document, what is assumed, rules, exit codes, and the way back from a plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from planner.specs.plan import PlanDocument
from tests.cli.conftest import SMALL_JOB, Cli

BASE = ["estimate", *SMALL_JOB]


def test_document(cli: Cli) -> None:
    """The JSON is a valid plan document and holds what the contract names."""
    result = cli(*BASE, "--tp", "2", "--recompute", "full", "--json")
    assert result.code == 0, result.err
    document = result.document
    jsonschema.validate(document, PlanDocument.model_json_schema())
    PlanDocument.model_validate_json(result.out)
    assert document["schema_version"] == 1
    assert document["search"]["status"] == "estimated"
    assert document["by_backend"] == {}
    best = document["best"]
    assert best["estimate"]["fits"] is True
    strategy = best["strategy"]
    assert strategy["tp"] * strategy["pp"] * strategy["cp"] * strategy["dp"] == 16
    assert strategy["grad_accum"] * strategy["micro_batch"] * strategy["dp"] == 64
    assert strategy["sequence_parallel"] is True
    assert "strategy.sequence_parallel" in {a["field"] for a in document["assumptions"]}


def test_plan_json_gives_the_same_estimate(cli: Cli, tmp_path: Path) -> None:
    """Estimating a written plan again gives the same id and figures."""
    first = cli(*BASE, "--pp", "2", "--json")
    path = tmp_path / "plan.json"
    path.write_text(first.out, encoding="utf-8")
    again = cli("estimate", str(path), "--json")
    assert again.document["best"] == first.document["best"]
    assert again.document["id"] == first.document["id"]


def test_edited_plan_is_refused(cli: Cli, tmp_path: Path) -> None:
    """A plan whose strategy contradicts its own cluster or breaks a rule is refused by estimate and render."""
    document = cli(*BASE, "--tp", "2", "--json").document
    changes: dict[str, dict[str, Any]] = {
        "tp": {"tp": 4},
        "batch": {"micro_batch": 2},
        "rule": {"ep": 2},
        "layers": {"layers_per_stage": [31]},
    }
    for name, change in changes.items():
        edited = json.loads(json.dumps(document))
        edited["best"]["strategy"].update(change)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(edited), encoding="utf-8")
        for command in ("estimate", "render"):
            result = cli(command, str(path))
            assert result.code == 2, (name, result.out[:500], result.err)
            assert "hint: " in result.err


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp"])
def test_every_backend_has_defaults(cli: Cli, backend: str) -> None:
    """With nothing but the machines stated, every framework's usual layout is estimated."""
    result = cli(*BASE, "--backend", backend, "--recompute", "full", "--json")
    assert result.code in (0, 3), result.out
    assert result.document["best"]["backend"] == backend


def test_does_not_fit(cli: Cli) -> None:
    """A strategy without enough memory is estimated in full, and the exit code is 3."""
    arguments = ["estimate", "--model", "llama-3.1-70b", "--gpus", "8", "--gpu", "h100", "--global-batch", "64"]
    result = cli(*arguments)
    assert result.code == 3
    assert "DOES NOT FIT" in result.out
    assert "Time of a step" in result.out
    assert result.err == ""
    document = cli(*arguments, "--json").document
    assert document["best"]["estimate"]["fits"] is False


def test_rule_is_quoted(cli: Cli) -> None:
    """A broken rule comes with its reason, the equation and the place where the framework enforces it."""
    result = cli(*BASE, "--micro-batch", "3")
    assert result.code == 2
    assert "micro_batch(3)" in result.err
    assert "rule " in result.err


def test_more_recompute_is_less_memory_and_more_time(cli: Cli) -> None:
    """The option reaches the cost model."""
    plain, full = (cli(*BASE, "--recompute", mode, "--json").document["best"]["estimate"] for mode in ("none", "full"))
    assert full["peak_memory_bytes"] < plain["peak_memory_bytes"]
    assert full["step_time_s"] > plain["step_time_s"]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--layers-per-stage", "15,17", "--pp", "2"], {"layers_per_stage": [15, 17]}),
        (["--no-sequence-parallel", "--tp", "2"], {"sequence_parallel": False}),
        (
            ["--recompute", "full:3", "--pp", "2"],
            {"recompute": {"mode": "full", "modules": [], "layers_per_stage": [3, 3]}},
        ),
        (["--zero-stage", "0"], {"zero_stage": 0}),
        (["--micro-batch", "2"], {"micro_batch": 2, "grad_accum": 2}),
        (["--cp", "2"], {"cp": 2, "dp": 8}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_reach_the_strategy(cli: Cli, arguments: list[str], fields: dict[str, Any]) -> None:
    """Each option of the strategy is found again in the document."""
    result = cli(*BASE, *arguments, "--json")
    assert result.code in (0, 3), result.out
    strategy = result.document["best"]["strategy"]
    assert {name: strategy[name] for name in fields} == fields
