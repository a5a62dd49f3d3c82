"""What can start the rendered job; every launcher runs launch.sh on each node."""

from __future__ import annotations

from typing import Literal

Launcher = Literal["torchrun", "slurm", "trainjob", "pytorchjob", "skypilot", "mpirun"]
