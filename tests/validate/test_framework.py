"""Runs of the frameworks themselves: what is started, what is refused, and what the report says of a log.

Frameworks that train on GPUs only are stood in for by a process that prints their log; the FSDP files do train."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest

from planner.errors import InputError, MissingExtraError
from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.service.requests import StatedModel
from planner.specs.plan import PlanDocument
from planner_validate.frameworks.framework import check_devices, report, run, started
from planner_validate.frameworks.logs import MEGATRON, RunLog, read_log
from planner_validate.frameworks.starts import (
    FRAMEWORKS,
    MOCK_DATA,
    MOCK_TOKENIZER,
    amounts,
    check_installed,
    framework_of,
    prepared,
)
from planner_validate.runs.devices import Machine
from planner_validate.runs.launching import Ended, private_folder
from planner_validate.runs.options import Options
from tests.golden.plans import CASES
from tests.parsers.interpreter import PYTHON, lacking
from tests.validate.test_framework_logs import megatron_line, megatron_memory

STEPS = 8


SHAPES = {
    "megatron": StrategyInput(tp=4, zero_stage=1),
    "deepspeed": StrategyInput(zero_stage=2),
    "torchtitan": StrategyInput(zero_stage=3),
    "fsdp": StrategyInput(zero_stage=3),
}


@cache
def one_node(backend: str, gpus: int = 8) -> PlanDocument:
    """A plan for the GPUs of one node."""
    job = JobInput(seq_len=4096, global_batch=64)
    return estimate("llama-3-8b", ClusterInput(gpu="h100", gpus=gpus), job, SHAPES[backend], backend=backend)


def shows(gpus: int) -> Machine:
    """A machine with so many GPUs."""
    return Machine(torch="2.13.0", gpus=("NVIDIA H100 80GB HBM3",) * gpus)


@pytest.mark.parametrize("backend", ["nanotron-pipeline", "accelerate-fsdp-full", "megatron-bridge-dense"])
def test_frameworks_without_a_program_of_their_own(backend: str) -> None:
    """Their files need a script and data of the user's: the answer names what can be started, and the other way."""
    with pytest.raises(InputError, match="without a program") as caught:
        framework_of(CASES[backend].document)
    assert caught.value.allowed == "megatron, deepspeed, torchtitan, fsdp"


@pytest.mark.parametrize("backend", ["megatron", "torchtitan"])
def test_missing_frameworks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 6, and how to install it."""
    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    monkeypatch.setattr("planner_validate.frameworks.starts._found", lambda module: False)
    with pytest.raises(MissingExtraError, match="is not installed here") as caught:
        check_installed(FRAMEWORKS[backend])
    assert caught.value.exit_code == 6
    assert "install" in str(caught.value.hint)


def test_a_checkout_of_megatron_is_looked_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MEGATRON_PATH must hold the program; the package comes with it."""
    monkeypatch.setattr("planner_validate.frameworks.starts._found", lambda module: module != "megatron")
    monkeypatch.setenv("MEGATRON_PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"no pretrain_gpt\.py"):
        check_installed(FRAMEWORKS["megatron"])
    (tmp_path / "pretrain_gpt.py").write_text("")
    check_installed(FRAMEWORKS["megatron"])


def test_several_nodes_are_refused() -> None:
    """This command starts processes on one machine."""
    plan = CASES["fsdp-full"].document
    assert plan.request.cluster.nodes > 1
    with pytest.raises(InputError, match="nodes"):
        prepared(plan, FRAMEWORKS["fsdp"], STEPS)


def test_too_few_gpus() -> None:
    """Exit code 6 with both numbers; as many as the plan needs are enough."""
    with pytest.raises(MissingExtraError, match="needs 8 GPUs and this machine shows 2"):
        check_devices(one_node("fsdp"), FRAMEWORKS["fsdp"], lambda: shows(2))
    check_devices(one_node("fsdp"), FRAMEWORKS["fsdp"], lambda: shows(8))


def test_megatron_reads_no_data_and_writes_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a user's own job do not reach the run; so the rendered script takes mock data."""
    for name in ("DATA_PATH", "CHECKPOINT_DIR", "TOKENIZER_MODEL"):
        monkeypatch.setenv(name, "/home/me")
    launch = prepared(one_node("megatron"), FRAMEWORKS["megatron"], STEPS)
    assert not {"DATA_PATH", "CHECKPOINT_DIR", "TOKENIZER_MODEL"} & set(launch.environment)
    assert launch.environment["TRAIN_ITERS"] == str(STEPS)
    assert launch.arguments == ("--exit-interval", str(STEPS))
    assert launch.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_torchtitan_gets_a_corpus() -> None:
    """A tokenizer within the vocabulary, and text for every data rank at the path of the data set."""
    plan = one_node("torchtitan")
    launch = prepared(plan, FRAMEWORKS["torchtitan"], STEPS)
    tokenizer = json.loads(launch.files[f"{MOCK_TOKENIZER}/tokenizer.json"])
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) <= plan.request.model.vocab
    lines = [json.loads(line) for line in launch.files[MOCK_DATA].splitlines()]
    assert len(lines) >= 4 * plan.best.strategy.dp
    assert {word for line in lines for word in line["text"].split()} <= set(vocabulary)
    assert launch.environment["DATASET"] == "c4_test"
    assert '--training.steps "${TRAIN_STEPS:-20}"' in launch.files["torchtitan_args.sh"]


def test_deepspeed_reports_every_step() -> None:
    """Its log level and its interval are changed, nothing else of its configuration."""
    plan = one_node("deepspeed")
    launch = prepared(plan, FRAMEWORKS["deepspeed"], STEPS)
    config = json.loads(launch.files["ds_config.json"])
    assert (config.pop("steps_per_print"), config.pop("log_level")) == (1, "info")
    rendered = json.loads(
        prepared(plan, dataclasses.replace(FRAMEWORKS["deepspeed"], adapt=_as_it_is), 8).files["ds_config.json"]
    )
    rendered.pop("steps_per_print")
    assert config == rendered


def _as_it_is(_plan: PlanDocument, files: dict[str, str]) -> dict[str, str]:
    return files


def printing(plan: PlanDocument, script: str, timeout_s: float = 60.0) -> tuple[RunLog, Ended]:
    """What is read of a run whose launch script stands in for the framework."""

    def stand_in(_plan: PlanDocument, files: dict[str, str]) -> dict[str, str]:
        return files | {"launch.sh": script + "\n"}

    framework = dataclasses.replace(FRAMEWORKS[plan.best.backend], adapt=stand_in)
    with private_folder() as folder:
        output, ended = started(plan, framework, Options(timeout_s=timeout_s), folder)
    return read_log(output, framework.log, amounts(plan.best.strategy)), ended


def megatron_log(seconds: float) -> str:
    times = [60_000.0 if step == 1 else 1e3 * seconds * (1 + 0.01 * (step % 3)) for step in range(1, STEPS + 1)]
    lines = [megatron_line(step, spent, 12 - step / 4) for step, spent in enumerate(times, 1)]
    lines[1:1] = [megatron_memory(0, 1, 40_000.0, 50_000.0), megatron_memory(4, 1, 41_000.0, 51_000.0)]
    return "\n".join(lines) + "\n"


def test_a_printed_log_becomes_a_report(tmp_path: Path) -> None:
    """A process prints Megatron-LM's log: medians, spread, memory of the fullest rank, losses, and no failure."""
    plan = one_node("megatron")
    predicted = plan.best.estimate.step_time_s
    (tmp_path / "log").write_text(megatron_log(predicted))
    log, ended = printing(plan, f"cat '{tmp_path}/log'")
    made = report(plan, FRAMEWORKS["megatron"], log, ended)
    assert made.step_time is not None
    assert made.peak_memory is not None
    assert made.step_time.measured == pytest.approx(predicted * 1.01, rel=1e-4)
    assert made.step_time.within
    assert 0 < (made.step_time.spread or 0) < 0.02
    assert made.peak_memory.measured == 51_000 * 2**20
    assert "reserved" in made.peak_memory.name
    assert len(made.losses) == STEPS
    assert [rank.rank for rank in made.ranks] == [0, 4]
    assert len(made.ranks[0].steps) == STEPS - 3
    assert made.failures == ()
    assert made.verdict == ("within" if made.peak_memory.within else "outside")


def test_a_slow_framework_is_outside() -> None:
    """Three times the predicted step time: outside, with a first suspect."""
    plan = one_node("megatron")
    log = read_log(megatron_log(3 * plan.best.estimate.step_time_s), MEGATRON, amounts(plan.best.strategy))
    made = report(plan, FRAMEWORKS["megatron"], log, Ended("finished", 0, ""))
    assert made.verdict == "outside"
    assert made.step_time is not None
    assert "slower" in made.step_time.suspect
    assert made.step_time.suspect in made.suspects


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("echo '[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1", "out-of-memory", "CUDA"),
        ("echo nothing of interest; exit 3", "error", "exit code 3"),
        ("echo done", "error", "no step"),
        ("exec no-such-program-anywhere", "error", "exit code 127"),
        ("kill -9 $$", "error", "exit code 137"),
    ],
)
def test_failures_are_reported(script: str, kind: str, message: str) -> None:
    """Whatever ends a run, the report says so, with the last lines of the log."""
    plan = one_node("megatron")
    log, ended = printing(plan, script)
    made = report(plan, FRAMEWORKS["megatron"], log, ended)
    assert made.verdict == "failed"
    assert made.step_time is None
    assert made.failures[0].kind == kind
    assert message in made.failures[0].message


def test_a_silent_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that prints nothing for too long is ended with all its children, and reported as a timeout."""
    monkeypatch.setattr("planner_validate.runs.launching.BEYOND_S", 1.0)
    plan = one_node("megatron")
    (tmp_path / "log").write_text(megatron_log(1.0))
    script = f"head -5 '{tmp_path}/log'; setsid sleep 1000 & echo $! > '{tmp_path}/pid'; sleep 1000"
    log, ended = printing(plan, script, timeout_s=1.0)
    made = report(plan, FRAMEWORKS["megatron"], log, ended)
    assert ended.how == "stalled"
    assert made.failures[-1].kind == "timeout"
    assert made.failures[-1].phase == "after step 3"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_loss_that_is_none(tmp_path: Path) -> None:
    """It is left out of a document that has no number for it."""
    plan = one_node("megatron")
    text = "\n".join(megatron_line(step, 1000.0, float("nan")) for step in range(1, STEPS + 1))
    made = report(plan, FRAMEWORKS["megatron"], read_log(text, MEGATRON, {}), Ended("finished", 0, ""))
    assert made.losses == ()
    assert made.model_dump_json()


@pytest.mark.torch
@pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch"))
def test_rendered_fsdp_files_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the plan to the report with real processes: two of them train the tiny model of the rendered script."""
    plan = one_node("fsdp", 2)
    tiny = dataclasses.replace(FRAMEWORKS["fsdp"], arguments=lambda steps: ("--tiny", "--steps", str(steps)))
    monkeypatch.setattr("planner_validate.frameworks.framework.framework_of", lambda plan: tiny)
    told: list[str] = []
    made = run(plan, Options(timeout_s=240.0), told.append, probe=lambda: shows(2))
    assert made.failures == ()
    assert made.step_time is not None
    assert len(made.losses) == STEPS
    assert made.losses[-1] < made.losses[0]
    assert made.peak_memory is None
    assert "The log says nothing of memory." in made.notes
    assert told[0].startswith("starting")


def test_options_are_the_common_ones() -> None:
    """Steps of the run are the steps of every mode."""
    assert Options().steps == STEPS


@pytest.mark.parsers
@pytest.mark.skipif(bool(lacking("deepspeed")), reason=lacking("deepspeed"))
def test_deepspeed_trains_on_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed itself, on two processes without a GPU: its timer's lines and the losses of the script are read."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", str(Path(PYTHON).parent) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr("planner_validate.frameworks.starts.sys.executable", PYTHON)
    job = JobInput(seq_len=64, global_batch=4)
    small = StatedModel(
        config={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    )
    plan = estimate(small, ClusterInput(gpu="h100", gpus=2), job, StrategyInput(zero_stage=2), backend="deepspeed")
    with private_folder() as folder:
        output, ended = started(plan, FRAMEWORKS["deepspeed"], Options(timeout_s=400.0), folder)
    log = read_log(output, FRAMEWORKS["deepspeed"].log, amounts(plan.best.strategy))
    made = report(plan, FRAMEWORKS["deepspeed"], log, ended)
    assert made.failures == ()
    assert made.step_time is not None
    assert made.losses[-1] < made.losses[0]


@pytest.mark.parametrize("strategy", [StrategyInput(tp=2, zero_stage=1), StrategyInput(pp=2, zero_stage=1)])
def test_deepspeed_splits_only_what_is_made_for_it(strategy: StrategyInput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a script of the user's such plans are refused before anything starts."""
    monkeypatch.delenv("TRAIN_SCRIPT", raising=False)
    plan = estimate(
        "llama-3-8b",
        ClusterInput(gpu="h100", gpus=8),
        JobInput(seq_len=4096, global_batch=64),
        strategy,
        backend="deepspeed",
    )
    with pytest.raises(InputError, match="need a training script"):
        prepared(plan, FRAMEWORKS["deepspeed"], STEPS)
