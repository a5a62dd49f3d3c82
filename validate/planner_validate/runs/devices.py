"""What this machine has to train on: torch, its devices and how many, asked of a process of its own, because importing
torch takes seconds and may fail in many ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

from planner.errors import MissingExtraError
from planner.specs.base import Spec

PROBE_S = 180.0
INSTALL = "pip install 'parallel-planner[validate]'"
_PROBE = """
import json
import torch
there = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if there else []
sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(len(names))]
print("\\n" + json.dumps({"torch": torch.__version__, "gpus": names, "gpu_bytes": sizes,
      "distributed": torch.distributed.is_available()}))
"""


class Machine(Spec):
    """What torch finds here."""

    torch: str
    """Its version."""
    gpus: tuple[str, ...] = ()
    """Names as the driver gives them."""
    gpu_bytes: tuple[int, ...] = ()
    distributed: bool = True


Probe = Callable[[], Machine]


@cache
def this_machine(interpreter: str = sys.executable) -> Machine:
    """Ask the interpreter that will run the plan; MissingExtraError where its torch cannot be used."""
    try:
        # The folder of the user may hold a torch.py; -P keeps it out.
        asked = subprocess.run(  # noqa: S603 - an interpreter and our own text
            [interpreter, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as problem:
        raise _no_torch(f"it did not answer within {PROBE_S:.0f} s") from problem
    if asked.returncode != 0:
        lines = [line for line in asked.stderr.splitlines() if line.strip()]
        raise _no_torch(lines[-1][:300] if lines else f"exit code {asked.returncode}")
    machine = Machine.model_validate(json.loads(asked.stdout.splitlines()[-1]))
    if not machine.distributed:
        raise _no_torch(f"torch {machine.torch} was built without torch.distributed")
    return machine


def _no_torch(why: str) -> MissingExtraError:
    return MissingExtraError(
        "a real run needs torch, which cannot be imported here",
        where="planner validate",
        got=why,
        allowed="torch 2.8 or newer of the extra `validate`",
        hint=INSTALL,
    )


def cores() -> int:
    """Processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def available_host_bytes() -> int | None:
    """Host memory that is free to take; None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
