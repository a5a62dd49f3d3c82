"""run.json of the validation run: what is read, and what is said of files that were edited wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import InputError
from planner.reading import read_configuration
from planner.render import render_plan
from tests.golden.plans import CASES

FILES = render_plan(CASES["pytorch-pipeline"].document)


def edited(**changes: Any) -> dict[str, str]:
    """The file with fields of strategy and job changed (``job_seq_len=1``), beside its launch script."""
    content = json.loads(FILES["run.json"])
    for name, value in changes.items():
        part, _, field = name.partition("_")
        content[part][field] = value
    return {"run.json": json.dumps(content), "launch.sh": FILES["launch.sh"]}


def ids(files: dict[str, str]) -> set[str]:
    return {finding.id for finding in read_configuration(files).findings}


def test_everything_is_stated() -> None:
    """Model, job and strategy are those of the plan, and nothing is found wrong."""
    read = read_configuration(edited())
    document = CASES["pytorch-pipeline"].document
    assert read.backend == "pytorch"
    assert read.model == document.request.model
    assert (read.gpus, read.gpus_per_node) == (128, 8)
    assert read.strategy.layers_per_stage == (20,) * 4
    assert read.findings == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"job_seq_len": 4096}, {"stated-twice"}),
        ({"strategy_precision": "fp32"}, {"stated-twice"}),
        ({"strategy_grad_accum": 3}, {"batch-product"}),
        ({"strategy_dp": 4, "strategy_grad_accum": 128}, {"world-size"}),
    ],
)
def test_contradictions(changes: dict[str, Any], found: set[str]) -> None:
    """What job, strategy and launch script say must agree."""
    assert ids(edited(**changes)) == found


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"model": {}, "job": {}, "strategy": {}, "device": "cpu"}', "run.json: model"),
        (edited(strategy_tp=0)["run.json"], "run.json: strategy.tp"),
        (edited(strategy_tq=1)["run.json"], "run.json: strategy.tq"),
    ],
)
def test_files_that_cannot_be_read(text: str, where: str) -> None:
    """The field is named."""
    with pytest.raises(InputError, match="no run that can be started") as caught:
        read_configuration({"run.json": text})
    assert str(caught.value.where).startswith(where)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"strategy": 1}', "null"])
def test_other_json_is_not_taken(text: str) -> None:
    """It is somebody else's, or nobody's."""
    with pytest.raises(InputError):
        read_configuration({"run.json": text})
