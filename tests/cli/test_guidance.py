"""What the planner tells a user to do next works when followed, and nothing that was asked is silently dropped."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main

from planner.backends import BACKENDS, COMPARED
from planner.cli.app import WITH_A_PLAN, app
from planner.search import relax
from planner.service import ClusterInput, JobInput, StrategyInput, resolve_cluster, resolve_job, resolve_model
from planner.service.why import why_next
from planner.specs.plan import Breakdown, PlanDocument
from planner.specs.strategy import Schedule, Strategy
from tests.cli.conftest import Cli

JOB = ["--seq-len", "4096", "--global-batch", "64"]
SUGGEST = ["suggest", "--model", "llama-3.1-8b", "--gpu", "h100", *JOB]

START = {
    "torchrun": "./launch.sh",
    "slurm": "sbatch job.sbatch",
    "trainjob": "kubectl apply -k . && kubectl create -f trainjob.yaml",
    "pytorchjob": "kubectl apply -k . && kubectl create -f pytorchjob.yaml",
    "skypilot": "sky launch skypilot.yaml",
}


def test_every_launcher_asked_for_is_named(cli: Cli, tmp_path: Path) -> None:
    """Several launchers give one command each after "Next:", and a section each in the guide."""
    out = tmp_path / "out"
    said = cli(*SUGGEST, "--gpus", "16", "--launcher", "skypilot, slurm,mpirun", "--out", str(out))
    assert said.code == 0, said.err
    lines = [line.split("&& ")[1] for line in said.out.strip().splitlines()[-3:]]
    assert lines == ["sbatch job.sbatch", "sky launch skypilot.yaml", "./launch_mpirun.sh"]
    guide = (out / "README.md").read_text(encoding="utf-8")
    assert all(f"\n    {command}" in guide for command in ("sbatch job.sbatch", "sky launch", "./launch_mpirun.sh"))


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun", "16"),
        ("torchrun", "8"),
        ("slurm", "16"),
        ("trainjob", "16"),
        ("pytorchjob", "8"),
        ("skypilot", "16"),
    ],
)
def test_next_command_starts_the_job(cli: Cli, tmp_path: Path, backend: str, launcher: str, gpus: str) -> None:
    """The command after "Next:" goes into the folder and names the script that starts the job, also by render."""
    first, second = tmp_path / "a run", tmp_path / "it's another"
    plan = [*SUGGEST, "--gpus", gpus, "--backend", backend, "--launcher", launcher]
    said = cli(*plan, "--out", str(first))
    assert said.code == 0, said.err
    again = cli("render", str(first / "plan.json"), "--launcher", launcher, "--out", str(second))
    assert again.code == 0, again.err
    for folder, result in ((first, said), (second, again)):
        command, _, comment = result.out.strip().splitlines()[-1].partition("#")
        words = shlex.split(command)
        assert words[:3] == ["cd", str(folder), "&&"]
        assert words[3:] == shlex.split(START[launcher])
        assert (folder / words[-1]).is_file()
        assert bool(comment) == (gpus == "16" and launcher == "torchrun")


def _option(name: str) -> Any:
    group = typer.main.get_command(app)
    parameters = group.commands["estimate"].params  # type: ignore[attr-defined]
    return next(parameter for parameter in parameters if parameter.name == name)


STATED = [
    parameter.name
    for parameter in typer.main.get_command(app).commands["estimate"].params  # type: ignore[attr-defined]
    if parameter.name not in WITH_A_PLAN
]


@pytest.mark.parametrize("name", STATED)
def test_plan_takes_no_other_option(cli: Cli, tmp_path: Path, name: str) -> None:
    """A plan.json beside any option that it would overrule is refused, even when the option repeats its default."""
    path = tmp_path / "plan.json"
    path.write_text("{}", encoding="utf-8")
    option = _option(name)
    value = [] if getattr(option, "is_flag", False) else ["1"]
    result = cli("estimate", str(path), option.opts[0], *value)
    assert result.code == 2
    assert f"{option.opts[0]} beside it" in result.err


def test_every_part_of_a_strategy_can_be_stated() -> None:
    """What a plan consists of, estimate takes as options; the rest follows from the machines and the job."""
    derived = {"dp", "grad_accum", "global_batch", "seq_len", "precision"}
    stated = set(StrategyInput.__dataclass_fields__) - {"schedule"} | {"pipeline_schedule"}
    assert set(Strategy.model_fields) - derived <= stated
    assert {"secondary_shard_degree"} <= set(STATED)


def test_help_names_only_schedules_that_some_framework_runs() -> None:
    """A word in a help text is not refused by every framework."""
    possible = {name for backend in BACKENDS.values() for vpp in (1, 2) for name in backend.schedules(4, vpp)}
    named = {word for word in get_args(Schedule) if word in _option("schedule").help}
    assert named
    assert named <= possible


EDITS: dict[str, dict[str, Any]] = {
    "another precision": {"precision": "fp32"},
    "modules without recomputation": {"recompute": {"mode": "none", "modules": ["mlp"]}},
    "layers without recomputation": {"recompute": {"mode": "none", "layers_per_stage": [4]}},
}


@pytest.fixture
def document(cli: Cli) -> Any:
    """A plan with tensor parallelism and without recomputation."""
    return cli("estimate", *SUGGEST[1:], "--gpus", "8", "--tp", "2", "--json").document


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("command", ["estimate", "render"])
def test_contradictory_edit_is_refused(
    cli: Cli, tmp_path: Path, document: Any, change: dict[str, Any], command: str
) -> None:
    """A plan that says two things at once is refused by every command that reads it."""
    document["best"]["strategy"].update(change)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    result = cli(command, str(path))
    assert result.code == 2, result.out
    assert "hint: " in result.err


@pytest.mark.parametrize("field", ["step_time_s", "mfu", "peak_memory_bytes", "memory_limit_bytes", "tokens_per_s"])
def test_impossible_figure_is_refused(cli: Cli, tmp_path: Path, document: Any, field: str) -> None:
    """Figures of an estimate are finite and not negative."""
    for value in ("-1", "1e400"):
        document["best"]["estimate"][field] = "VALUE"
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document).replace('"VALUE"', value), encoding="utf-8")
        assert cli("render", str(path)).code == 2


@pytest.mark.parametrize("field", ["nic_bytes_per_s", "network_bus_bytes_per_s", "oversubscription"])
def test_impossible_machine_is_refused(cli: Cli, tmp_path: Path, document: Any, field: str) -> None:
    """Rates of a hand-written cluster that would overflow the estimate are refused."""
    for value in ("1e400", "1e-300", "-1"):
        document["request"]["cluster"][field] = "VALUE"
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document).replace('"VALUE"', value), encoding="utf-8")
        assert cli("estimate", str(path)).code == 2


def test_rendered_guide_speaks_of_the_rendered_plan(cli: Cli, tmp_path: Path, document: Any) -> None:
    """After an edit that leaves the old figures behind, files and guide carry those of the edited plan, and say so."""
    document["best"]["strategy"]["sequence_parallel"] = False
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    fresh = cli("estimate", str(path), "--json").document["best"]["estimate"]
    assert fresh != document["best"]["estimate"]
    out = tmp_path / "out"
    assert cli("render", str(path), "--out", str(out)).code == 0
    written = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    assert written["best"]["estimate"] == fresh
    assert any("estimated again" in warning for warning in written["warnings"])
    assert "estimated again" in (out / "README.md").read_text(encoding="utf-8")


def test_unchanged_plan_is_rendered_as_it_is(cli: Cli, tmp_path: Path, document: Any) -> None:
    """Rendering a plan that nobody touched changes nothing in it."""
    path, out = tmp_path / "plan.json", tmp_path / "out"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert cli("render", str(path), "--out", str(out)).code == 0
    assert json.loads((out / "plan.json").read_text(encoding="utf-8")) == document


@pytest.mark.parametrize("gpu", ["tpu-v5p", "gaudi3", "trainium2"])
def test_what_no_rule_allows_is_not_called_too_little(cli: Cli, gpu: str) -> None:
    """Where rules refuse everything they are quoted, and more machines are not recommended."""
    arguments = ["suggest", "--model", "llama-3.1-8b", "--gpus", "64", "--gpu", gpu]
    result = cli(*arguments)
    assert result.code == 3
    assert "NVIDIA and AMD" in " ".join(result.err.split())
    assert "more GPUs" not in result.err
    details = cli(*arguments, "--json").document["error"]["details"]
    assert details["relaxations"] == []
    assert "gpu-vendor" in details["reasons"]["megatron"]


CHANGE = re.compile(r"with (--[a-z-]+) (\S+)$")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "llama-3.1-8b", "--gpus", "16", "--gpu", "h100", "--memory-margin", "0.95"],
        ["--model", "llama-3.1-70b", "--gpus", "8", "--gpu", "a100-sxm-40gb"],
        ["--model", "llama-3.1-8b", "--gpus", "1", "--gpu", "rtx-4090", "--backend", "megatron"],
    ],
    ids=["margin", "70b", "one GPU"],
)
def test_every_offered_change_works(cli: Cli, arguments: list[str]) -> None:
    """Each change is offered once a kind, and taking it literally gives a plan."""
    error = cli("suggest", *arguments, "--json").document["error"]
    found = [CHANGE.search(change) for change in error["details"]["relaxations"]]
    changes = [match.groups() for match in found if match]
    assert changes
    assert len({option for option, _ in changes}) == len(changes)
    for option, value in changes:
        assert cli("suggest", *arguments, option, value).code == 0, (option, value)


def test_no_change_is_promised_when_none_helps(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing that was tried helps, the hint says that instead of guessing."""
    monkeypatch.setattr(relax, "_changes", lambda *_, **__: iter(()))
    arguments = ["--model", "llama-3.1-70b", "--gpus", "8", "--gpu", "a100-sxm-40gb", "--host-memory-gib", "40"]
    error = cli("suggest", *arguments, "--json").document["error"]
    assert error["details"]["nearest"]
    assert "no single change" in error["hint"]


def test_pin_that_no_framework_takes_lists_what_each_allows(cli: Cli) -> None:
    """With several frameworks the error is not that of the first one alone."""
    result = cli(*SUGGEST, "--gpus", "16", "--pin", "recompute=banana", "--json")
    assert result.code == 2
    error = result.document["error"]
    for name in COMPARED:
        assert f"{name}: none" in error["allowed"]
        assert BACKENDS[name].title in error["message"]
    assert error["message"].count("is not possible") == 1


def test_missing_field_is_to_be_added(cli: Cli, tmp_path: Path) -> None:
    """A model file without a required dimension says which one is missing."""
    path = tmp_path / "model.yaml"
    path.write_text("hidden: 1024\n", encoding="utf-8")
    result = cli("suggest", "--model", str(path), "--gpus", "8", "--gpu", "h100")
    assert result.code == 2
    assert "missing" in result.err
    assert "hint: add layers" in result.err


def test_no_flash_attention_where_it_does_not_run() -> None:
    """On an architecture without FlashAttention the scores are counted, and that is an assumption; elsewhere not."""
    model, _, _ = resolve_model("llama-3.1-8b")
    for gpu, flash in (("v100-sxm2-32gb", False), ("a100-sxm-80gb", True), ("mi300x", True)):
        job = resolve_job(JobInput(), model, resolve_cluster(ClusterInput(gpu=gpu, gpus=8)).cluster)
        assert job.job.flash_attention is flash
        assert ("job.flash_attention" in {a.field for a in job.assumptions}) is not flash


def test_second_shard_is_shown(cli: Cli) -> None:
    """Two plans that differ in the second shard alone do not read alike."""
    base = ["estimate", *SUGGEST[1:], "--gpus", "16", "--backend", "deepspeed", "--zero-stage", "3"]
    plain, second = cli(*base), cli(*base, "--secondary-shard-degree", "8")
    assert second.code in (0, 3), second.err
    assert "second shard over 8" in second.out
    assert plain.out.splitlines()[1] != second.out.splitlines()[1]


def test_another_slowest_stage_is_not_called_a_cost(document: Any) -> None:
    """Arithmetic that grows by more than the step is said to be another stage's."""
    best = PlanDocument.model_validate(document).best
    leaf = best.estimate.time.model_copy
    names = {"mlp matrices": (8.0, 4.0), "output head": (0.0, 5.0), "pipeline bubble": (1.0, 1.0)}

    def plan(side: int) -> Any:
        parts = tuple(Breakdown(name=name, value=values[side]) for name, values in names.items())
        total = sum(part.value for part in parts)
        tree = leaf(update={"value": total, "combine": "sum", "children": parts})
        strategy = best.strategy.model_copy(update={"pp": 2})
        estimate = best.estimate.model_copy(update={"step_time_s": total, "time": tree})
        return best.model_copy(update={"strategy": strategy, "estimate": estimate})

    assert "another stage is the slowest" in why_next(plan(0), plan(1))


@pytest.mark.parametrize("command", ["models", "gpus"])
def test_empty_list_says_so(cli: Cli, command: str) -> None:
    """A filter that nothing passes is answered with a sentence, and with an empty list in JSON."""
    assert "Nothing has this text" in cli(command, "zzz").out
    assert cli(command, "zzz", "--json").document == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["gpus", "h100", "--json"]])
def test_full_disk_is_not_a_bug(arguments: list[str]) -> None:
    """Output that cannot be written ends in one message on stderr and exit code 2."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "planner", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: standard output: the output cannot be written")
    assert "Traceback" not in done.stderr
    assert "hint: " in done.stderr


def test_reader_that_leaves_is_no_error() -> None:
    """`planner models --json | head -1` prints nothing else."""
    command = f"{shlex.quote(sys.executable)} -m planner models --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "["
    assert done.stderr == ""
