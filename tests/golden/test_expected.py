"""Rendered texts, whole files: any change to a template shows up here as a difference that somebody has to accept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from planner.render import render_plan
from planner.specs.plan import PlanDocument
from tests.golden.plans import CASES

EXPECTED = Path(__file__).parent / "expected"


def rendered(name: str) -> dict[str, str]:
    """All files of a case but plan.json, which only repeats the document."""
    case = CASES[name]
    files = render_plan(case.document, launcher=case.launcher, hosts=case.hosts)
    return {path: text for path, text in files.items() if path != "plan.json"}


@pytest.mark.parametrize("name", CASES)
def test_files_equal_the_expected_ones(name: str, request: pytest.FixtureRequest) -> None:
    """Every file of the case has exactly the expected text, and there is no other file."""
    files, folder = rendered(name), EXPECTED / name
    if request.config.getoption("--update-golden"):
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    expected = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert sorted(files) == sorted(expected), "pytest --update-golden accepts the new set of files"
    for path, text in files.items():
        assert text == expected[path], f"{name}/{path} changed; pytest --update-golden accepts it"


def test_no_expected_folder_is_left_over() -> None:
    """Each folder of expected files belongs to a case."""
    assert sorted(path.name for path in EXPECTED.iterdir()) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_plan_json_is_the_document(name: str) -> None:
    """plan.json read back is the document that was rendered."""
    document = CASES[name].document
    text = render_plan(document)["plan.json"]
    assert PlanDocument.model_validate(json.loads(text)) == document


@pytest.mark.parametrize("name", CASES)
def test_rendering_is_deterministic(name: str) -> None:
    """The same document gives the same texts."""
    assert rendered(name) == rendered(name)


def test_a_chosen_plan_becomes_the_best_of_plan_json() -> None:
    """Rendering an alternative writes that alternative, and plan.json says so."""
    document = CASES["fsdp-full"].document
    other = document.best.model_copy(
        update={"strategy": document.best.strategy.model_copy(update={"micro_batch": 4, "grad_accum": 2})}
    )
    files = render_plan(document, plan=other)
    assert "MICRO_BATCH = 4 " in files["parallelize.py"]
    assert json.loads(files["plan.json"])["best"]["strategy"]["micro_batch"] == 4
