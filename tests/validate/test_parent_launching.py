"""Every way in which a run can end: what is told, in which order, and that no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from planner.errors import InputError
from planner_validate.runs.launching import (
    exit_codes,
    kind_of_text,
    launch,
    private_folder,
    requests_to_end,
    surroundings,
)
from tests.validate.runs import StandIn, config, hear_signals, processes_of

pytest.importorskip("torch", reason="torchrun starts the processes")
pytestmark = pytest.mark.torch


def test_a_run_that_finishes() -> None:
    """Results of all ranks in their order, no failure, progress told with totals, folder removed, nothing left."""
    told: list[str] = []
    stand_in = StandIn()
    launched = launch(config(), 2, told.append, command=stand_in)
    assert [result.rank for result in launched.results] == [0, 1]
    assert launched.failures == ()
    assert launched.how == "finished"
    assert all(len(result.steps) == 5 for result in launched.results)
    assert stand_in.folder is not None
    assert not stand_in.folder.exists()
    assert stand_in.left() == []
    assert all(words == "start" or words.endswith("of 5") for words in told)


def test_a_killed_rank() -> None:
    """The rank that was killed is named first, with the signal and its phase; the others are not blamed."""
    stand_in = StandIn("1:kill:9")
    launched = launch(config(), 2, command=stand_in)
    first = launched.failures[0]
    assert (first.rank, first.kind, first.phase) == (1, "killed", "step 2")
    assert [failure.rank for failure in launched.failures] == [1]
    assert stand_in.left() == []


@pytest.mark.parametrize(("number", "kind"), [(9, "killed"), (11, "error"), (7, "out-of-memory")])
def test_a_signal_ends_a_rank(number: int, kind: str) -> None:
    """Where the launcher can tell the signal, it says what happened: killed, crashed, or shared memory full."""
    launched = launch(config(), 2, command=StandIn(f"0:kill:{number},1:kill:{number}"))
    assert {each.kind for each in launched.failures} == {kind}
    assert signal.Signals(number).name in launched.failures[0].message


def test_consequences_come_after_the_cause() -> None:
    """Who lost the connection to the rank out of memory is told after it, although it spoke first."""
    stand_in = StandIn("0:lost:0/3,1:out-of-memory:0.5")
    launched = launch(config(), 2, command=stand_in)
    assert [(each.rank, each.kind) for each in launched.failures] == [(1, "out-of-memory"), (0, "error")]
    assert "layers.3" in launched.failures[0].message
    assert stand_in.left() == []


def test_a_stopped_rank() -> None:
    """A run that moves no more is given up, and the rank that was stopped is told from those that wait for it."""
    stand_in = StandIn("1:stop")
    launched = launch(config(timeout_s=1.0), 2, command=stand_in)
    assert launched.how == "stalled"
    assert [(each.rank, each.kind) for each in launched.failures] == [(1, "timeout"), (0, "timeout")]
    assert "stopped by a signal" in launched.failures[0].message
    assert launched.failures[0].phase == "step 2"
    assert stand_in.left() == []


def test_a_rank_that_spins() -> None:
    """An endless loop on one rank is told from ranks that wait."""
    stand_in = StandIn("0:spin")
    launched = launch(config(timeout_s=1.0), 2, command=stand_in)
    assert launched.failures[0].rank == 0
    assert "computes" in launched.failures[0].message
    assert stand_in.left() == []


def test_collective_timeout_points_at_the_stopped_rank() -> None:
    """Where a rank itself gave up waiting, the one that did not come is still the first cause."""
    stand_in = StandIn("0:timeout,1:stop")
    launched = launch(config(), 2, command=stand_in)
    assert [each.rank for each in launched.failures] == [1, 0]
    assert "stopped" in launched.failures[0].message
    assert stand_in.left() == []


def test_an_error_without_a_failure_file() -> None:
    """The last words of the rank's own log explain its exit code."""
    stand_in = StandIn("0:exit:7,1:exit:7")
    launched = launch(config(), 2, command=stand_in)
    assert launched.failures[0].kind == "error"
    assert "exit code 7: ValueError: the shapes do not fit" in launched.failures[0].message
    assert "Traceback" in launched.failures[0].details


def test_grandchildren_are_ended() -> None:
    """A deaf process in a session of its own, started by a rank that has ended, goes with the run."""
    stand_in = StandIn("1:children")
    launched = launch(config(), 2, command=stand_in)
    assert launched.failures[0].rank == 1
    assert stand_in.left() == []


def test_a_launcher_that_cannot_start() -> None:
    """A program that ends at once without a word is a failure with its output, not an endless wait."""

    def nothing(*_: object) -> list[str]:
        return [sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(4)"]

    launched = launch(config(), 2, command=nothing)
    assert launched.results == ()
    assert "exit code 4" in launched.failures[0].message
    assert "no such thing" in launched.failures[0].details


DRIVER = """
import sys
sys.path[:0] = {paths!r}
from planner_validate.runs.launching import launch
from tests.validate.runs import StandIn, config
stand_in = StandIn("1:pid")
def command(folder, processes):
    print(folder.root, flush=True)
    return stand_in(folder, processes)
launched = launch(config(), 2, command=command)
print(launched.how, flush=True)
print([(each.rank, each.kind, each.phase) for each in launched.failures], flush=True)
"""


def driver() -> tuple[subprocess.Popen[str], str]:
    """A process that launches a run which never ends, and the run's folder, once all ranks have started."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(paths=[path for path in sys.path if path])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    end = time.monotonic() + 120
    while len(list(Path(folder, "results").glob("*.phase"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    return process, folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_interrupted(number: signal.Signals) -> None:
    """Ctrl-C and its kin end all processes, and what every rank was doing is told."""
    process, folder = driver()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert "interrupted" in out, err
    assert "(1, 'interrupted', 'step 2')" in out
    assert processes_of(folder) == []
    assert not Path(folder).exists()


def test_the_parent_is_killed() -> None:
    """Nobody is left to clean up, and yet neither a process nor the folder stays."""
    process, folder = driver()
    assert len(processes_of(folder)) >= 3
    process.kill()
    process.communicate(timeout=60)
    assert processes_of(folder, within_s=20) == []
    assert not Path(folder).exists()


def test_the_keeper_is_killed() -> None:
    """The process between parent and launcher dies: the parent notices and ends the rest itself."""
    process, folder = driver()
    keeper = next(pid for pid in children_of(process.pid))
    os.kill(keeper, signal.SIGKILL)
    process.communicate(timeout=60)
    assert processes_of(folder, within_s=5) == []


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_outside_the_main_thread() -> None:
    """A service may launch from a thread, where signal handlers cannot be set."""
    found = []
    thread = threading.Thread(target=lambda: found.append(launch(config(), 2, command=StandIn())))
    thread.start()
    thread.join(120)
    assert found[0].how == "finished"


def test_ignored_signals_stay_ignored() -> None:
    """A run under nohup survives its terminal; other requests are collected and handed back afterwards."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with requests_to_end() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        assert asked == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == terminate
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_room_for_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder that cannot be written is bad input with the way out."""
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-folder")
    with pytest.raises(InputError, match="cannot be written") as caught, private_folder():
        pass
    assert "TMPDIR" in str(caught.value.hint)


def test_exit_codes_of_the_launcher() -> None:
    """Only ranks that ended by themselves are in the summary of torchrun."""
    output = "\n".join(
        [
            "Failures:",
            "[1]:",
            "  time      : 2026-01-01_00:00:00",
            "  host      : here",
            "  rank      : 3 (local_rank: 3)",
            "  exitcode  : 1 (pid: 12)",
            "Root Cause (first observed failure):",
            "[0]:",
            "  rank      : 12 (local_rank: 12)",
            "  exitcode  : -9 (pid: 34)  (SIGKILL)",
            "[2]:",
            "  rank      : 0 (local_rank: 0)",
            "  exitcode  : -15 (pid: 56)  (SIGTERM)",
        ]
    )
    assert exit_codes(output) == {3: 1, 12: -9, 0: -15}
    assert exit_codes(f"W1130 api.py:1028] Sending process 56 closing signal SIGTERM\n{output}") == {3: 1, 12: -9}
    assert exit_codes("all is well") == {}


def test_words_for_want_of_memory() -> None:
    assert kind_of_text("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory") == "out-of-memory"
    assert kind_of_text("torch.OutOfMemoryError: CUDA out of memory.") == "out-of-memory"
    assert kind_of_text("KeyError: 'memory'") is None


def test_outer_launchers_do_not_shine_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a job around the planner do not reach the run; the planner is found from any folder."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES"):
        monkeypatch.setenv(name, "7")
    made = surroundings(3, "cpu")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES"} & set(made)
    assert made["OMP_NUM_THREADS"] == "3"
    code = "import planner.specs.validation, planner_validate.runs.options, sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=made, cwd="/", capture_output=True, text=True, check=True)
    assert "torch" not in json.dumps(done.stdout).split("'")
