"""A client that is generated from the description works: ask, look, result, files, cancel, and problems as told."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.service.document import read_plan
from tests.api.conftest import Running
from tests.api.questions import SMALL

DESCRIPTION = Path(__file__).parents[2] / "api" / "openapi.json"


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the package that openapi-python-client made."""
    generator = shutil.which(os.environ.get("PLANNER_CLIENT_GENERATOR", "openapi-python-client"))
    if generator is None:
        pytest.skip(
            "PLANNER_CLIENT_GENERATOR does not name openapi-python-client, which needs an environment of its own"
        )
    made = subprocess.run(
        [generator, "generate", "--path", DESCRIPTION, "--output-path", tmp_path / "made_client", "--meta", "none"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "Endpoint" not in made.stdout, made.stdout
    monkeypatch.syspath_prepend(str(tmp_path))
    return "made_client"


def test_the_whole_way(generated: str, service: Running) -> None:
    def part(name: str) -> Any:
        return importlib.import_module(f"{generated}.{name}")

    with part("client").Client(base_url=service.url, timeout=60) as client:
        _go(part, client)


def _go(part: Callable[[str], Any], client: Any) -> None:
    """Ask, look, take the result and the files, cancel; and be refused."""
    body = part("models.plan_body").PlanBody.from_dict(SMALL)
    job = part("api.plans.plans_create").sync(client=client, body=body, prefer="wait=60")
    assert job.state == "succeeded"
    assert part("api.plans.plans_look").sync(job.id, client=client).outcome == "plan"
    document = part("api.plans.plans_result").sync(job.id, client=client)
    assert document.best.backend == "megatron"
    listed = part("api.artifacts.artifacts_listed").sync(job.id, client=client, launcher="slurm")
    assert {"launch.sh", "job.sbatch", "plan.json"} <= {file.name for file in listed.files}
    again = part("api.plans.plans_result").sync_detailed(job.id, client=client).content
    assert read_plan(again.decode(), "result").best.estimate.step_time_s == document.best.estimate.step_time_s
    assert part("api.plans.plans_cancel").sync(job.id, client=client).state == "succeeded"
    refused = part("api.plans.plans_look").sync("0" * 64, client=client)
    assert (refused.status, refused.type_) == (404, "urn:planner:problem:not-found")
