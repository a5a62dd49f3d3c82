"""Real runs of the command line: one that succeeds, and the ways in which one goes wrong while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.plan import PlanDocument
from planner_validate.runs import keeper
from planner_validate.runs.launching import Folder, torchrun
from planner_validate.runs.options import Options
from planner_validate.runs.running import run
from tests.validate.runs import TINY, hear_signals, planned, processes_of

pytest.importorskip("torch", reason="the runs need it")
pytestmark = pytest.mark.torch

LONG = ("--steps", "5000", "--no-gradient-check")
"""A run that does not end by itself before something is done to it."""


class Started:
    """``planner validate`` in a process of its own, with a temporary folder that nobody else has."""

    def __init__(self, folder: Path, document: PlanDocument, *options: str) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        plan = folder / "plan.json"
        plan.write_text(json.dumps(document.to_json_dict()))
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "planner", "validate", str(plan), *options],
            env={**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hear_signals,
        )

    def reach(self, phase: str, within_s: float = 240.0) -> None:
        """Wait until rank 1 has begun a phase."""
        end = time.monotonic() + within_s
        while time.monotonic() < end and self._process.poll() is None:
            for path in (self.folder / "tmp").glob("*/results/rank-1.phase"):
                if path.read_text().startswith(phase):
                    return
            time.sleep(0.05)
        raise AssertionError(f"never reached {phase}: {self._process.communicate(timeout=30)}")

    def rank(self, rank: int) -> int:
        """Process id of a rank."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={rank}".encode() in words and any(str(self.folder).encode() in word for word in words):
                return int(folder.name)
        raise AssertionError(f"no process of rank {rank}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Exit code and what was printed; nothing of the run may be left by then."""
        out, err = self._process.communicate(timeout=300)
        assert processes_of(str(self.folder)) == []
        assert list((self.folder / "tmp").iterdir()) == []
        return self._process.returncode, out, err


def test_a_real_run(tmp_path: Path) -> None:
    """Two processes train: gradients equal, loss falls, files and record are written, the exit code is the verdict."""
    record, prefix = tmp_path / "runs.jsonl", tmp_path / "run"
    started = Started(tmp_path, planned(gpus=2), "--json", "--out", str(prefix), "--record", str(record))
    code, out, err = started.end()
    document = json.loads(out)
    assert document["failures"] == [], err
    assert code == {"within": 0, "outside": 5}[document["verdict"]]
    assert document["gradients"]["largest_relative_error"] < 1e-4
    assert document["losses"][-1] < document["losses"][0]
    assert len(document["losses"]) == 8
    assert len(document["ranks"]) == 2
    assert document["step_time"]["measured"] > 0
    assert {path.suffix for path in tmp_path.glob("run.*")} >= {".json", ".md"}
    assert len(record.read_text().splitlines()) == 1


def test_a_rank_is_killed(tmp_path: Path) -> None:
    started = Started(tmp_path, planned(gpus=2), *LONG)
    started.reach("step 2")
    os.kill(started.rank(1), signal.SIGKILL)
    code, out, _ = started.end()
    assert code == 5
    assert "FAILED: rank 1, killed in step" in out
    assert "SIGKILL" in out


def test_a_rank_hangs_in_a_collective(tmp_path: Path) -> None:
    """A stopped rank makes the others wait; the run is given up and the stopped one is named first."""
    started = Started(tmp_path, planned(gpus=2), *LONG, "--timeout", "4")
    started.reach("step 2")
    os.kill(started.rank(1), signal.SIGSTOP)
    code, out, _ = started.end()
    assert code == 5
    assert "FAILED: rank 1, timeout in step" in out
    assert "stopped by a signal" in out
    assert "look at the named rank" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C says where every rank stood, with exit code 130."""
    started = Started(tmp_path, planned(gpus=2), *LONG)
    started.reach("step 2")
    started.signal(number)
    code, out, _ = started.end()
    assert code == 130
    assert "interrupted in step" in out
    assert "forward and backward" in out
    assert "Loss" in out
    assert "run it again" in out


def limited(limit: str) -> Callable[[Folder, int], list[str]]:
    """The launcher with a resource limit around it."""

    def command(folder: Folder, processes: int) -> list[str]:
        return ["bash", "-c", f'ulimit {limit}; exec "$@"', "run", *torchrun(folder, processes)]

    return command


def test_out_of_memory(tmp_path: Path) -> None:
    """A model that does not fit into what a process may take: which rank, in which phase, and no traceback hunt."""
    wide = tmp_path / "wide.yaml"
    wide.write_text(TINY.read_text().replace("vocab: 2048", "vocab: 500000"))
    document = estimate(
        str(wide),
        ClusterInput(gpu="cpu", gpus=2),
        JobInput(seq_len=64, global_batch=2, precision="fp32"),
        StrategyInput(zero_stage=3),
        backend="pytorch",
    )
    made = run(document, Options(check_gradients=False), command=limited("-v 1100000"))
    assert made.verdict == "failed"
    assert made.failures[0].kind == "out-of-memory"
    assert made.failures[0].rank is not None
    assert made.failures[0].phase.startswith(("building the model", "warm-up step 1"))
    assert made.step_time is None


def test_a_full_disk_under_the_workers() -> None:
    """Results that cannot be written are a failure that says so."""
    made = run(planned(gpus=2), Options(check_gradients=False), command=limited("-f 2"))
    assert made.verdict == "failed"
    assert any("File too large" in f"{each.message}{each.details}" for each in made.failures)


def test_other_processes_than_the_plan_has() -> None:
    """A launcher that starts another number of processes is told by the workers themselves."""
    made = run(planned(gpus=2), Options(), command=lambda folder, _: torchrun(folder, 1))
    assert made.failures[0].kind == "mismatch"
    assert "2 processes" in made.failures[0].message


def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    """Launcher and keeper killed at once: the workers go by themselves."""
    started = Started(tmp_path, planned(gpus=2), *LONG)
    started.reach("step 1")
    mark = next(
        entry
        for entry in Path(f"/proc/{started.rank(0)}/environ").read_bytes().decode().split("\0")
        if entry.startswith(keeper.MARK)
    ).partition("=")[2]
    workers = [process.pid for process in keeper.marked(mark) if process.rank is not None]
    assert len(workers) >= 2
    for process in keeper.marked(mark):
        if process.rank is None:
            os.kill(process.pid, signal.SIGKILL)
    code, out, _ = started.end()
    assert code == 5
    assert "FAILED" in out
