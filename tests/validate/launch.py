"""Starting several processes of a test under torchrun, on a port of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(processes: int, *command: str, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run ``command`` (a script with its arguments, or ``-m`` and a module) in so many processes; all of them are gone
    on return."""
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'validate'}", OMP_NUM_THREADS="1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    started = subprocess.Popen(
        [*launcher, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, 9)
        started.communicate()
        raise
    return subprocess.CompletedProcess(started.args, started.returncode, output, "")
