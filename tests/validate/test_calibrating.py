"""``planner calibrate --on-this-machine`` with real processes, on pieces of work that are done at once."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from planner.catalog import load_model, model_ids
from planner.cli.main import run
from planner.errors import InputError, MeasurementError, MissingExtraError
from planner.service.profiles import load_profile
from planner.specs.benchmark import Benchmark, BenchmarkKind
from planner.specs.measuring import BenchmarkConfig
from planner.specs.profile import Profile
from planner_validate.calibration import calibrating, worklist
from planner_validate.calibration.calibrating import Options, calibrate_this_machine, combined, measured, trained
from planner_validate.calibration.probes import SIZES, Size, training_runs
from planner_validate.runs.devices import Machine, this_machine
from tests.strategies import machines

ALONE: dict[BenchmarkKind, dict[str, int]] = {
    "copy": {"bytes": 1 << 16},
    "gemm forward": {"tokens": 32, "inputs": 24, "outputs": 16},
    "gemm input gradient": {"tokens": 32, "inputs": 24, "outputs": 16},
    "gemm weight gradient": {"tokens": 32, "inputs": 24, "outputs": 16},
    "attention forward": {"batch": 1, "heads": 2, "kv_heads": 1, "length": 16, "width": 8},
    "attention backward": {"batch": 1, "heads": 2, "kv_heads": 1, "length": 16, "width": 8},
    "elementwise": {"tokens": 16, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48},
    "loss": {"tokens": 8, "vocab": 100},
    "block": {"tokens": 4, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 32},
    "optimizer": {"parameters": 1000},
    "cpu optimizer": {"parameters": 1000},
}
TOGETHER: tuple[BenchmarkKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
TINY = Size(layers=2, hidden=32, ffn=48, heads=4, vocab=64, tokens=16)


def every_kind() -> tuple[Benchmark, ...]:
    """One of each on a processor, and what a processor cannot do."""
    alone = [Benchmark(kind=kind, shape=shape) for kind, shape in ALONE.items()]
    together = [Benchmark(kind=kind, shape={"bytes": 4096}, ranks=2) for kind in TOGETHER]
    impossible = [
        Benchmark(kind="host to device", shape={"bytes": 4096}),
        Benchmark(kind="all-reduce", shape={"bytes": 4096}, ranks=3),
        Benchmark(kind="gemm forward", shape=ALONE["gemm forward"], precision="nvfp4"),
    ]
    return (*alone, *together, *impossible)


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.torch
@needs_torch
def test_every_kind_is_timed() -> None:
    """Two processes time each kind of work and train every layout; what cannot be done has its reason, and the rest
    goes on."""
    benchmarks = every_kind()
    sizes, SIZES["cpu"] = SIZES["cpu"], (TINY,)
    try:
        runs = training_runs(machines("cpu", 2), "cpu", "fp32", threads=1)
    finally:
        SIZES["cpu"] = sizes
    # Long enough for a phase to be seen between two looks at the files.
    config = BenchmarkConfig(device="cpu", benchmarks=benchmarks, visits=1, repeats=2, batch_s=2e-2, runs=runs)
    phases: list[str] = []
    results = measured(config, 2, phases.append)
    rows, missing = combined(config, results)
    assert {row.kind for row in rows} == {*ALONE, *TOGETHER}
    assert all(0.0 < row.seconds < 60.0 and row.repeats == 2 for row in rows)
    assert len(missing) == 3
    reasons = " ".join(missing.values())
    for words in ("the device works in host memory", "groups of 3 do not fill 2", "nvfp4 matrices are not"):
        assert words in reasons
    timed = trained(config, results)
    assert len(timed) == len(runs) == 6
    assert all(run.step_time_s > 0.0 for run in timed)
    assert any(phase.endswith("%)") for phase in phases), phases
    assert any("training run" in phase for phase in phases), phases


@pytest.mark.torch
@needs_torch
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures, prints and writes a profile that estimates then use."""
    few = tuple(Benchmark(kind=kind, shape=shape) for kind, shape in ALONE.items())
    monkeypatch.setattr(calibrating, "worklist", lambda _: few)
    monkeypatch.setitem(SIZES, "cpu", (TINY,))
    out = tmp_path / "machine.yaml"
    arguments = ["calibrate", "--on-this-machine", "--gpu", "cpu", "--nproc", "1", "--quick", "--out", str(out)]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for words in ("Factors on the published constants", "gemm forward", "small, 1 process", f"--profile {out}"):
        assert words in printed
    profile = load_profile(out)
    assert profile.processes == 1
    assert profile.accelerator == "cpu"
    assert len(profile.measurements) == len(few)
    assert set(profile.versions) == {"python", "torch"}
    assert profile.factors.keys() >= {"gemm_share", "stream_share"}
    assert yaml.safe_load(out.read_text(encoding="utf-8")) == profile.model_dump(mode="json")
    assert run(arguments) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.torch
@needs_torch
def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that is killed ends the measurement with its name, and none of the others stays."""
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import os, signal, threading\n"
        "if os.environ.get('RANK') == '1':\n"
        "    threading.Timer(6.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    endless = tuple(Benchmark(kind="copy", shape={"bytes": 4 * size}) for size in range(1, 2000))
    config = BenchmarkConfig(device="cpu", benchmarks=endless, visits=100)
    with pytest.raises(MeasurementError) as caught:
        measured(config, 2, lambda _: None)
    assert "process 1" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.torch
@needs_torch
def test_a_process_that_raises() -> None:
    """Its own words are what is told."""
    (run_of_four, *_) = training_runs(machines("cpu", 4), "cpu", "fp32", threads=1)
    config = BenchmarkConfig(device="cpu", benchmarks=(), runs=(run_of_four,))
    with pytest.raises(MeasurementError, match=r"failed at training run 1: .*\b4\b"):
        measured(config, 2, lambda _: None)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 6 and what to install."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    this_machine.cache_clear()
    with pytest.raises(MissingExtraError) as caught:
        calibrate_this_machine(Options(gpu="cpu"))
    assert "no torch here" in str(caught.value)
    assert "parallel-planner[validate]" in str(caught.value)
    assert caught.value.exit_code == 6


NONE = Machine(torch="2.13.0")
TWO_L4 = Machine(torch="2.13.0", gpus=("NVIDIA L4", "NVIDIA L4"), gpu_bytes=(23_034 << 20, 23_034 << 20))


@pytest.mark.parametrize(
    ("options", "devices", "error", "words"),
    [
        (Options(gpu="h100"), NONE, MissingExtraError, "sees no GPU here"),
        (Options(gpu="h100"), TWO_L4, InputError, "another accelerator"),
        (Options(processes=3), TWO_L4, InputError, "torch sees 2 GPUs"),
        (Options(gpu="cpu", processes=0), NONE, InputError, "1 to 64"),
        (Options(gpu="cpu", precision="bf16"), NONE, InputError, "no bf16 matrix rate"),
        (Options(gpu="warp9"), NONE, InputError, "warp9"),
    ],
    ids=["no GPU", "another GPU", "more processes than GPUs", "no process", "no such format", "no such accelerator"],
)
def test_refusals(
    options: Options, devices: Machine, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be measured here is refused before any process starts."""
    monkeypatch.setattr(calibrating, "probe", lambda: devices)
    monkeypatch.setattr(calibrating, "measured", lambda *_: pytest.fail("must not start"))
    with pytest.raises(error, match=words):
        calibrate_this_machine(options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--from-records FILE, or --on-this-machine"),
        (["--on-this-machine", "--from-records", "x.jsonl"], "one of the two"),
        (["--from-records", "x.jsonl", "--nproc", "2"], "--nproc: this option belongs to --on-this-machine"),
        (["--from-records", "x.jsonl", "--quick"], "--quick: this option belongs to --on-this-machine"),
        (["--on-this-machine", "--precision", "fp8"], "allowed: bf16, fp16, fp32"),
        (["--on-this-machine", "--seq-len", "0"], "--seq-len"),
        (["--on-this-machine", "--model", "no-such-model"], "no-such-model"),
        (["--on-this-machine", "--out", "/no/such/folder/x.yaml"], "the folder does not exist"),
    ],
    ids=["neither", "both", "foreign option", "foreign flag", "format", "length", "model", "folder"],
)
def test_command_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with what is allowed; nothing is measured."""
    assert run(["calibrate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_parent_needs_no_torch() -> None:
    """What the command line imports loads no torch."""
    script = "import sys, planner_validate.calibration.calibrating\nprint('torch' in sys.modules)"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == "False"


def test_old_profiles_are_read() -> None:
    """A profile without measurements is as valid as before."""
    profile = Profile.model_validate(
        {"planner_version": "0.1.0", "created": "2026-01-31", "accelerator": "cpu", "framework": "pytorch"}
    )
    assert profile.measurements == ()
    assert profile.processes is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_worklist(device: str, quick: bool) -> None:
    """Every formula is covered, no benchmark stands twice, and none is more work than the device does at once."""
    wanted = worklist.Wanted(
        device="cpu" if device == "cpu" else "cuda",
        processes=4,
        precision="fp32",
        flops_per_s=9.6e10 if device == "cpu" else 1e15,
        quick=quick,
        narrow=device == "cuda",
    )
    listed = worklist.worklist(wanted)
    assert len({one.model_dump_json() for one in listed}) == len(listed)
    kinds = {one.kind for one in listed}
    assert kinds >= {*ALONE, *TOGETHER}
    assert ("host to device" in kinds) is (device == "cuda")
    assert {one.ranks for one in listed} == {1, 2, 4}
    for one in listed:
        if one.kind.startswith("gemm"):
            flops = 2.0 * one.shape["tokens"] * one.shape["inputs"] * one.shape["outputs"]
            assert flops <= wanted.most_flops
        if one.precision == "fp8" and one.kind.startswith("gemm"):
            assert all(size % 16 == 0 for size in one.shape.values())


@pytest.mark.parametrize("name", model_ids())
def test_worklist_of_every_model(name: str) -> None:
    """The shapes of any catalogued model fit a processor: nothing is larger than its memory or longer than a moment."""
    model = load_model(name).spec
    wanted = worklist.Wanted(
        device="cpu", processes=2, precision="fp32", flops_per_s=9.6e10, model=model, seq_len=100_000
    )
    for one in worklist.worklist(wanted):
        shape = one.shape
        if one.kind.startswith("gemm"):
            assert 2.0 * shape["tokens"] * shape["inputs"] * shape["outputs"] <= wanted.most_flops
            assert 4 * shape["inputs"] * shape["outputs"] <= wanted.scale.most_bytes
        elif one.kind.startswith("attention"):
            assert 10.0 * shape["heads"] * shape["length"] ** 2 * shape["width"] <= wanted.most_flops
        elif one.kind == "loss":
            assert 16 * shape["tokens"] * shape["vocab"] <= max(wanted.scale.most_bytes, 16 * shape["vocab"])
        elif one.kind == "elementwise":
            assert 16 * shape["tokens"] * (shape["hidden"] + shape["ffn"]) <= wanted.scale.most_bytes
