"""How far an estimate can be from a measurement: the measured error of its class on public runs.

The ranges of uncertainty.yaml hold 80 % of runs that the constants were not fitted to; a framework, a kind of model or
an accelerator without measured runs gets the wider range of runs that were left out with everything like them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.catalog.loader import read_yaml
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import OUTSIDE_EXPERIENCE


@dataclass(frozen=True)
class Uncertainty:
    """Ends of the 80 % ranges as factors on the point estimate."""

    step_time_lower: float
    step_time_upper: float
    memory_lower: float
    memory_upper: float
    basis: str
    """What the ranges rest on, in words; says "outside measured experience" where nothing alike was measured."""


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    document: dict[str, Any] = read_yaml(Path(__file__).with_name("uncertainty.yaml"))
    return document


def measured_ranges() -> dict[str, Any]:
    """The ranges of step time and memory by class, as the file has them."""
    return {"step time": _document()["step_time"], "memory": _document()["memory"]}


def class_name(family: str, job: Job, model: ModelSpec) -> str:
    """The class whose measured error an estimate shares: framework family, kind of model, width of the matrices."""
    kind = "experts" if model.moe is not None else "dense"
    return f"{family} {kind} {'8/4-bit' if job.narrow else '16-bit'}"


def memory_class_name(family: str, model: ModelSpec) -> str:
    """The class of a memory estimate; the width of the matrices hardly matters to it."""
    return f"{family} {'experts' if model.moe is not None else 'dense'}"


def uncertainty_for(family: str, accelerator: str, job: Job, model: ModelSpec, *, assumed: bool = False) -> Uncertainty:
    """Ranges of an estimate; ``assumed`` where settings of the run had to be filled in."""
    document = _document()
    name = class_name(family, job, model)
    time, time_basis = _range(document["step_time"], name, accelerator, assumed=assumed)
    memory, memory_basis = _range(document["memory"], memory_class_name(family, model), accelerator, assumed=False)
    return Uncertainty(*time, *memory, f"step time: {time_basis}; memory: {memory_basis}")


def _range(table: dict[str, Any], name: str, accelerator: str, *, assumed: bool) -> tuple[tuple[float, float], str]:
    """(lower, upper) and what it rests on."""
    entry = table["classes"].get(name)
    if entry is None:
        low, high = table["outside"]["class"]
        return (
            low,
            high,
        ), f"{OUTSIDE_EXPERIENCE} (no measured run of {name}); error of frameworks that were left out whole"
    low, high = entry["range"]
    if entry["from"] == "outcomes":
        basis = f"{entry['runs']} runs of {name} that ended out of memory"
    else:
        basis = f"80 % of {entry['runs']} measured runs of {name}"
    if assumed:
        wide_low, wide_high = table["outside"]["assumed"]
        low, high = min(low, wide_low), max(high, wide_high)
        basis += ", widened for settings that were filled in"
    if accelerator not in entry["accelerators"]:
        widening = table["outside"]["accelerator_widening"]
        low, high = low**widening, high**widening
        basis += f", widened: {accelerator} is {OUTSIDE_EXPERIENCE} for this class"
    return (low, high), basis
