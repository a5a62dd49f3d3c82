"""What rendering refuses, and that names from users stay inert."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from planner.errors import InputError
from planner.render import render_plan, write_files
from planner.specs.launcher import Launcher
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Recompute
from tests.golden.plans import CASES, LLAMA_8B, MEGATRON_70B, document

HOSTILE = 'x"; touch owned; $(touch owned) `touch owned` \'\n"""\ntouch owned\n#'

PLAIN_ID = "xtouchownedto"
"""What is left of the hostile id in names of jobs."""
LAUNCHERS = ",".join(get_args(Launcher))


def renamed(name: str, model: str) -> PlanDocument:
    """A case whose model is called ``model``."""
    case = CASES[name].document
    request = case.request
    return case.model_copy(
        update={"request": request.model_copy(update={"model": request.model.model_copy(update={"name": model})})}
    )


@pytest.mark.parametrize("name", ["megatron-dense-interleaved", "deepspeed-zero3", "fsdp-full"])
def test_a_hostile_name_runs_nothing(name: str, tmp_path: Path) -> None:
    """Quotes, back-ticks and line breaks in a model's name or a plan's id reach neither shell, Python nor YAML."""
    case = renamed(name, HOSTILE).model_copy(update={"id": HOSTILE})
    write_files(tmp_path / "out", render_plan(case, launcher=LAUNCHERS))
    plain = render_plan(CASES[name].document.model_copy(update={"id": PLAIN_ID}), launcher=LAUNCHERS)
    for path in (tmp_path / "out").iterdir():
        if path.suffix == ".py":
            ast.parse(path.read_text())
        if path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text()) == yaml.safe_load(plain[path.name])
        if path.suffix in (".sh", ".sbatch"):
            environment = {"PATH": "/usr/bin:/bin"}
            subprocess.run(["bash", path.name], cwd=path.parent, env=environment, capture_output=True, check=False)
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize("host", ["a b", "$(id)", "x;y", "", "-n1", "a\nb"])
def test_bad_host_names_are_refused(host: str) -> None:
    """Only characters of host names pass."""
    with pytest.raises(InputError, match="host name"):
        render_plan(CASES["deepspeed-zero3"].document, hosts=[host, "good"])


@pytest.mark.parametrize("hosts", [["one"], ["one", "two", "three"], ["same", "same"]])
def test_hosts_must_match_the_nodes(hosts: list[str]) -> None:
    """One distinct name a node."""
    with pytest.raises(InputError, match="do not match"):
        render_plan(CASES["deepspeed-zero3"].document, hosts=hosts)


def test_hosts_reach_hostfile_and_head_node() -> None:
    """Given names replace the placeholders."""
    files = render_plan(CASES["deepspeed-zero3"].document, hosts=["gpu-a", "gpu-b.local"])
    assert files["hostfile"] == "gpu-a slots=8\ngpu-b.local slots=8\n"
    assert "HEAD_NODE:-gpu-a}" in files["launch.sh"]


def test_unknown_launcher_and_framework_are_refused() -> None:
    """The error lists what can be rendered."""
    case = CASES["fsdp-full"].document
    for wrong in ("mpi", "", "slurm,", "slurm;trainjob"):
        with pytest.raises(InputError, match="unknown launcher"):
            render_plan(case, launcher=wrong)
    with pytest.raises(InputError, match="this framework"):
        render_plan(case, plan=case.best.model_copy(update={"backend": "paxml"}))


def test_a_plan_for_another_number_of_gpus_is_refused() -> None:
    """The degrees must multiply to the cluster's GPUs."""
    case = CASES["fsdp-full"].document
    strategy = case.best.strategy.model_copy(update={"dp": 32, "shard_degree": 32})
    with pytest.raises(InputError, match="= 32, but the cluster has 64 GPUs"):
        render_plan(case, plan=case.best.model_copy(update={"strategy": strategy}))


@pytest.mark.parametrize(
    ("backend", "strategy", "recompute", "match"),
    [
        ("fsdp", {"pp": 2, "dp": 4, "zero_stage": 3, "shard_degree": 4}, None, "no pipeline"),
        ("fsdp", {"cp": 2, "dp": 4, "zero_stage": 3, "shard_degree": 1}, None, "multiple of cp"),
        ("megatron", MEGATRON_70B | {"layers_per_stage": (40, 40)}, None, "2 entries"),
        (
            "megatron",
            MEGATRON_70B | {"layers_per_stage": (20,) * 4},
            Recompute(mode="full", layers_per_stage=(3, 5, 5, 5)),
            "same number of layers",
        ),
        ("nanotron", {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved"}, None, "no virtual stages"),
    ],
    ids=[
        "fsdp-pipeline",
        "fsdp-shards-split-a-sequence",
        "stages-do-not-match",
        "uneven-recompute",
        "nanotron-virtual-stages",
    ],
)
def test_what_a_framework_cannot_express_is_refused(
    backend: str, strategy: dict[str, Any], recompute: Recompute | None, match: str
) -> None:
    """Nothing else than the plan is written."""
    with pytest.raises(InputError, match=match):
        render_plan(document(backend, strategy, model=LLAMA_8B, recompute=recompute))
