"""What is asked of a validation, as the command line or a library user gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError

WARMUP_STEPS = 3
LEAST_STEPS = 8
"""Three that warm up and five that are measured: fewer have no spread worth the name."""
MOST_STEPS = 10_000

Progress = Callable[[str], None]
"""Told what a run does at the moment."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a plan; None is worked out from the plan."""

    steps: int = LEAST_STEPS
    """Optimizer steps in all; the first WARMUP_STEPS are not measured."""
    processes: int | None = None
    """Processes to start, which must be the GPUs of the plan; None: as many."""
    profile: Path | None = None
    """Machine profile for the prediction; None: the one in the plan, if any."""
    timeout_s: float = 300.0
    """Longest wait without any progress; longer where the plan's steps are."""
    check_gradients: bool = True

    def __post_init__(self) -> None:
        if not LEAST_STEPS <= self.steps <= MOST_STEPS:
            raise InputError(
                "this is no number of steps to measure",
                where="--steps",
                got=str(self.steps),
                allowed=f"{LEAST_STEPS} to {MOST_STEPS} ({WARMUP_STEPS} of them warm up)",
                hint=f"leave it out for {LEAST_STEPS}",
            )
        if not 1.0 <= self.timeout_s <= 86_400.0:
            raise InputError(
                "this is no time to wait",
                where="--timeout",
                got=f"{self.timeout_s:g}",
                allowed="1 to 86400 seconds",
                hint="leave it out for 300",
            )

    @property
    def measured_steps(self) -> int:
        return self.steps - WARMUP_STEPS
