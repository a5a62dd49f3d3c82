"""``planner validate`` as a user meets it: what it refuses and why, what it prints, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.cli.main import run
from planner.errors import InputError, MissingExtraError
from planner.specs.plan import PlanDocument
from planner.specs.validation import RunConfig
from planner_validate.runs import devices
from planner_validate.runs.devices import Machine
from planner_validate.runs.options import Options
from planner_validate.runs.plans import runnable
from tests.validate.runs import as_predicted, found_for, planned


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan.json of a tiny model for four processes."""
    return saved(planned(), tmp_path)


def saved(document: PlanDocument, folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(document.to_json_dict()))
    return path


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interpreter whose torch cannot be imported."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    devices.this_machine.cache_clear()
    yield
    devices.this_machine.cache_clear()


Capture = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("no_torch")
def test_without_torch(plan: Path, capsys: Capture) -> None:
    """Exit code 6 with the reason and what to install, before anything is started."""
    assert run(["validate", str(plan)]) == 6
    err = capsys.readouterr().err
    assert "libtorch_cpu.so" in err
    assert "pip install 'parallel-planner[validate]'" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc", "3"], ["tp 1 * pp 1 * cp 1 * dp 4 = 4", "--proxy", "--memory-only", "planner suggest --gpus 3"]),
        (["--steps", "3"], ["8 to 10000"]),
        (["--timeout", "0"], ["1 to 86400"]),
        (["--timeout", "nan"], ["1 to 86400"]),
        (["--proxy", "--memory-only"], ["exclude each other"]),
        (["--results", "/no/such/folder"], ["no such folder"]),
        (["--launcher", "slurm"], ["--out FOLDER"]),
        (["--out", "/proc/x"], ["cannot be written"]),
        (["--record", "/proc/x.jsonl"], ["cannot be added"]),
        (["--profile", "/no/such.yaml"], ["no such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_bad_input(plan: Path, options: list[str], words: list[str], capsys: Capture) -> None:
    """Exit code 2, what was wrong, and the way out; nothing is started for it."""
    assert run(["validate", str(plan), *options]) == 2
    err = capsys.readouterr().err
    for each in words:
        assert each in err


def test_a_model_that_the_runner_has_not(tmp_path: Path, capsys: Capture) -> None:
    """A plan of another framework for a model outside the decoder is refused with the modes that can do it."""
    from planner import service

    document = service.estimate(
        "bloom-560m",
        service.ClusterInput(gpu="h100", gpus=2),
        service.JobInput(seq_len=64, global_batch=8, precision="fp32"),
        service.StrategyInput(zero_stage=3),
        backend="fsdp",
    )
    assert run(["validate", str(saved(document, tmp_path))]) == 2
    err = capsys.readouterr().err
    assert "ALiBi positions" in err
    assert "--with-framework" in err
    assert "--to" not in err


def gpu_plan(gpus: int = 4) -> PlanDocument:
    return planned(gpus=gpus, gpu="h100")


def test_gpus_are_missing() -> None:
    """None at all, and too few: both with the way out and exit code 6."""
    none, two = Machine(torch="2.13.0"), Machine(torch="2.13.0", gpus=("NVIDIA H100 80GB HBM3",) * 2)
    with pytest.raises(MissingExtraError, match="sees no GPU") as caught:
        runnable(gpu_plan(), Options(), lambda: none)
    assert "--memory-only" in str(caught.value.hint)
    with pytest.raises(MissingExtraError, match="has 2") as caught:
        runnable(gpu_plan(), Options(), lambda: two)
    assert "--launcher" in str(caught.value.hint)
    assert caught.value.exit_code == 6


def test_gpus_of_another_kind_are_told() -> None:
    """The run goes on, and the report says that the estimate is of another device."""
    other = Machine(torch="2.13.0", gpus=("NVIDIA A100-SXM4-80GB",) * 4)
    found, config = runnable(gpu_plan(), Options(), lambda: other)
    assert config.device == "cuda"
    assert "A100" in found.notes[0]
    same = Machine(torch="2.13.0", gpus=("NVIDIA H100 80GB HBM3",) * 4)
    assert runnable(gpu_plan(), Options(), lambda: same)[0].notes == ()


def test_more_memory_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that would take all of the host memory are not started."""
    monkeypatch.setattr("planner_validate.runs.plans.available_host_bytes", lambda: 1_000_000_000)
    with pytest.raises(InputError, match="host memory"):
        runnable(planned(), Options(), lambda: Machine(torch="2.13.0"))


def folder_of_results(folder: Path, ranks: int = 4) -> Path:
    found = found_for()
    folder.mkdir()
    for result in as_predicted(found)[:ranks]:
        (folder / f"rank-{result.rank}.json").write_text(result.model_dump_json())
    return folder


def test_results_of_a_job(plan: Path, tmp_path: Path, capsys: Capture) -> None:
    """Files that ranks wrote elsewhere become the same report; exit code 0 where they are as predicted."""
    folder = folder_of_results(tmp_path / "results")
    assert run(["validate", str(plan), "--results", str(folder), "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "WITHIN the stated ranges" in out
    assert f"Written: {tmp_path / 'run.md'}" in out.replace("\n", "")
    assert run(["validate", str(plan), "--results", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "within"


def test_results_that_are_incomplete(plan: Path, tmp_path: Path, capsys: Capture) -> None:
    """A rank without a file fails the validation by its number; a damaged file by its name."""
    folder = folder_of_results(tmp_path / "results", ranks=3)
    assert run(["validate", str(plan), "--results", str(folder)]) == 5
    assert "no file of rank 3" in capsys.readouterr().out
    (folder / "rank-3.json").write_text('{"rank": 3, "wor')
    assert run(["validate", str(plan), "--results", str(folder)]) == 5
    assert "rank-3.json is not what this version writes" in capsys.readouterr().out


def test_results_of_another_plan(plan: Path, tmp_path: Path, capsys: Capture) -> None:
    """Another number of processes and another strategy are refused, not compared."""
    folder = folder_of_results(tmp_path / "results")
    two = saved(planned(gpus=2), tmp_path / "results")
    assert run(["validate", str(two), "--results", str(folder)]) == 2
    assert "world size 4" in capsys.readouterr().err
    other = planned("kept")
    asked = other.request
    config = RunConfig(
        model=asked.model, cluster=asked.cluster, job=asked.job, strategy=other.best.strategy, device="cpu"
    )
    (folder / "run.json").write_text(config.model_dump_json())
    assert run(["validate", str(plan), "--results", str(folder)]) == 2
    assert "another strategy" in capsys.readouterr().err


def test_an_empty_folder_of_results(plan: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "results").mkdir()
    assert run(["validate", str(plan), "--results", str(tmp_path / "results")]) == 2
    assert "no results of ranks" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_printed_first(
    plan: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk costs the files and the exit code, not what was measured."""

    def full(*_: object, **__: object) -> None:
        raise InputError("the files could not be written: No space left on device")

    monkeypatch.setattr("planner_validate.reports.report.write_files", full)
    folder = folder_of_results(tmp_path / "results")
    command = ["validate", str(plan), "--results", str(folder), "--out", str(tmp_path / "run")]
    assert run(command) == 2
    printed = capsys.readouterr()
    assert "WITHIN" in printed.out
    assert "No space left" in printed.err
    assert run([*command, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "within"
    assert "No space left" in printed.err
