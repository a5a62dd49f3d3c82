"""How far an estimate can be from a measurement, by framework and class of job.

The factors are the measured spread of the reference runs in tests/reference (uncertainty.yaml says which); a plan
fits only when the upper end of its memory range fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.catalog.loader import read_yaml
from planner.specs.job import Precision


@dataclass(frozen=True)
class Uncertainty:
    """Ends of the 80 % ranges as factors on the point estimate."""

    step_time_lower: float
    step_time_upper: float
    memory_lower: float
    memory_upper: float
    basis: str
    """What the range rests on, in words."""


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    document: dict[str, Any] = read_yaml(Path(__file__).with_name("uncertainty.yaml"))
    return document


def uncertainty_for(backend: str, precision: Precision, *, moe: bool) -> Uncertainty:
    """Ranges of this backend's class; an unlisted backend gets the widest."""
    document = _document()
    entry = document["backends"].get(backend, document["unmeasured"])
    name = ("moe" if moe else "dense") + ("-fp8" if precision in ("fp8", "nvfp4") else "")
    low, high = entry["step_time"][name]
    memory_low, memory_high = entry["memory"]["moe" if moe else "dense"]
    return Uncertainty(low, high, memory_low, memory_high, str(entry["basis"]))
