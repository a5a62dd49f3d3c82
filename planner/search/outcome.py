"""What the search reports: the plan, what it had to reject, and, if nothing fits, the nearest miss and the least
change.

Only data; how it is found stands in engine.py and relax.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from planner.specs.batch import StrategyBatch

Pin = int | str | bool
Status = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True)
class Progress:
    """State of a running search."""

    best_step_time_s: float | None
    bound_s: float | None
    solved: int
    candidates: int


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class NearestMiss:
    """The candidate that exceeds the memory by the least, with as much recomputation and offload as it can have."""

    batch: StrategyBatch
    """One row."""
    excess_bytes: float
    """Bytes over the limit, the upper end of the estimate counted."""
    where: Literal["gpu", "host"]
    needed_bytes: float
    limit_bytes: float


@dataclass(frozen=True)
class Relaxation:
    """A change of the question for which a plan exists (it was searched for and found)."""

    field: Literal["pin", "loss", "precision", "backend", "gpus", "seq_len", "host_memory_gib"]
    value: str
    """New value; for a pin the name of the pin to drop."""
    text: str
    """The change as a sentence with the flag to use."""


@dataclass(frozen=True)
class InfeasibleReport:
    """Why there is no plan."""

    rejected: dict[str, int]
    nearest: NearestMiss | None
    relaxations: tuple[Relaxation, ...]
    """Verified changes, the least one first; empty when none of those tried helps."""
    complete: bool = True
    """False when the time limit ended the search for changes."""


@dataclass(frozen=True)
class Outcome:
    """Result of one search over one backend."""

    status: Status
    best: StrategyBatch | None
    """One row."""
    alternatives: tuple[StrategyBatch, ...] = ()
    """Best known plan of each of the next meshes (tp, cp, pp, ep, dp, zero_stage), ranked; each legal, fitting,
    evaluated."""
    best_bound_s: float | None = None
    """No plan has a smaller step time (objective memory: of the plans with that little memory)."""
    gap: float | None = None
    """(best - bound) / best; 0 when proven, None when unknown."""
    candidates: int = 0
    """Legal candidates, before inner decisions."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejections by rule id; "does-not-fit" counts legal candidates without enough memory.  A rejection made while
    only part of a candidate's degrees was chosen counts once for all its completions."""
    solved: int = 0
    """Constraint models solved."""
    seconds: float = 0.0
    infeasible: InfeasibleReport | None = None
    alternatives_proven: tuple[bool, ...] = ()
    """For each alternative, whether it is proven to be the best of its mesh's examined candidates or an incumbent."""
    interrupted: bool = False
    """Ctrl-C ended the search; what it had found until then is here."""
