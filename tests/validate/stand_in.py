"""A worker that trains nothing: it goes through the phases of a run, writes the files of a rank, and misbehaves on
request (``RANK:what[:argument]``; of failures the argument is seconds before/after they are told)."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from planner.specs.validation import RankFailure, RankResult, RunConfig, StepMeasure

STEP_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--do", default="")
    asked = parser.parse_args()
    config = RunConfig.model_validate_json(asked.config.read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deeds = {int(who): rest for who, _, rest in (each.partition(":") for each in asked.do.split(",") if each)}

    def phase(words: str) -> None:
        (asked.out / f"rank-{rank}.phase").write_text(words)

    phase("start")
    steps = []
    for number in range(1, config.measured_steps + 1):
        phase(f"step {number}")
        time.sleep(STEP_S)
        steps.append(StepMeasure(seconds=0.5, forward_backward_s=0.4, optimizer_s=0.09, loss=5.0 - number / 10))
        if number == 2:
            misbehave(deeds.get(rank, ""), rank, asked.out)
            waits = any(what.split(":")[0] in ("stop", "kill", "spin", "pid") for what in deeds.values())
            if waits and rank not in deeds:
                for_ever()
    result = RankResult(
        rank=rank, world_size=world, steps=tuple(steps), peak_allocated_bytes=1 << 20, memory={"weights": 1 << 20}
    )
    (asked.out / f"rank-{rank}.json").write_text(result.model_dump_json())


def misbehave(what: str, rank: int, out: Path) -> None:
    deed, _, argument = what.partition(":")
    if deed == "kill":
        os.kill(os.getpid(), int(argument or signal.SIGKILL))
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "spin":
        while True:
            pass
    elif deed == "exit":
        sys.stderr.write("Traceback (most recent call last):\nValueError: the shapes do not fit\n")
        sys.exit(int(argument or 1))
    elif deed == "children":
        # Neither in the session nor among the children of the launcher, and deaf to requests.
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        time.sleep(0.3)
        sys.exit(3)
    elif deed in ("out-of-memory", "lost", "timeout", "mismatch"):
        kind = "error" if deed == "lost" else deed
        failure = RankFailure.model_validate(
            {"rank": rank, "kind": kind, "phase": "step 2", "message": MESSAGES[deed], "details": ""}
        )
        before, _, after = argument.partition("/")
        time.sleep(float(before or 0))
        (out / f"rank-{rank}.failure.json").write_text(failure.model_dump_json())
        time.sleep(float(after or 0))
        sys.exit(1)
    elif deed == "pid":
        for_ever()


MESSAGES = {
    "out-of-memory": "tried to allocate 2.0 GiB in layers.3",
    "lost": "Connection closed by peer [127.0.0.1]:4711",
    "timeout": "waited 2 s in all_reduce",
    "mismatch": "the plan is for 4 processes",
}


def for_ever() -> None:
    """Like a collective that never comes back, deaf to a polite request."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
