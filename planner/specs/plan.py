"""The answer: estimates, the reasons behind them, and the document that command line, API and plan.json share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile
from planner.specs.strategy import Strategy

SCHEMA_VERSION = 1

OUTSIDE_EXPERIENCE = "outside measured experience"
"""Said of ranges for which no run of the same kind was measured."""


class Breakdown(Spec):
    """A named quantity and what it is made of; the value is the sum or the maximum of the children."""

    name: str
    value: float
    """Bytes or seconds, as the root of the tree says."""
    combine: Literal["leaf", "sum", "max"] = "leaf"
    children: tuple[Breakdown, ...] = ()
    source: str = ""
    """Formula or measurement a leaf comes from."""


class Estimate(Spec):
    """What the cost model says of one strategy."""

    step_time_s: float = Field(gt=0)
    step_time_range_s: tuple[float, float]
    tokens_per_s: float = Field(ge=0)
    tokens_per_s_per_gpu: float = Field(ge=0)
    model_flops_per_s_per_gpu: float = Field(ge=0)
    """Model FLOPs (6 per used weight and token, causal attention counted once) without recomputation."""
    mfu: float = Field(ge=0)
    """model_flops_per_s_per_gpu over the dense peak of the 16-bit format (of the fp8 format for fp8 jobs)."""
    peak_memory_bytes: float = Field(gt=0)
    """Worst rank, worst phase, as the device reports it (allocator, context and communication buffers)."""
    peak_memory_range_bytes: tuple[float, float]
    range_basis: str = ""
    """What the two ranges rest on: measured runs of the same class, or that there are none."""
    memory_limit_bytes: float = Field(gt=0)
    fits: bool
    """The upper end of the memory range is within the limit, on the GPU and on the host."""
    host_memory_bytes_per_node: float = Field(ge=0)
    memory: Breakdown
    time: Breakdown
    cost_per_million_tokens: float | None = None
    """US dollars, when a price per GPU-hour is known."""


class Plan(Spec):
    """A strategy for one backend with its estimate and the reasons for it."""

    backend: str
    strategy: Strategy
    estimate: Estimate
    why: tuple[str, ...] = ()


class Assumption(Spec):
    """Something the user did not say and the planner filled in."""

    field: str
    value: Any
    why: str


class Request(Spec):
    """The normalised question."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    backend: str = "auto"
    pins: dict[str, int | str | bool] = Field(default_factory=dict)
    profile: Profile | None = None
    """Calibrated factors on the published constants; null: none."""


class SearchReport(Spec):
    """How the answer was found and how far it can be from the best."""

    status: Literal["optimal", "feasible", "infeasible", "estimated"]
    """optimal: proven; feasible: stopped by the time limit; estimated: a given strategy, nothing was searched."""
    best_bound_s: float | None = None
    """No plan can be faster than this (of the objective's step time)."""
    gap: float | None = None
    """(best - bound) / best; 0 when proven, null when unknown."""
    candidates: int = 0
    rejected: dict[str, int] = Field(default_factory=dict)
    """Candidates refused by each rule."""
    solved: int = 0
    """Constraint models solved."""
    seconds: float = 0.0


class PlanDocument(Spec):
    """The whole result of suggest or estimate."""

    schema_version: int = SCHEMA_VERSION
    planner_version: str
    id: str
    """SHA-256 of the normalised request and the catalogue version."""
    request: Request
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()
    best: Plan
    alternatives: tuple[Plan, ...] = ()
    by_backend: dict[str, Plan | None] = Field(default_factory=dict)
    search: SearchReport

    def to_json_dict(self) -> dict[str, Any]:
        """The document as plain JSON types; fields that a backend does not have are absent."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        # An absent backend is a statement (it was tried and has no plan), so it stays as null.
        document["by_backend"] = {name: document.get("by_backend", {}).get(name) for name in self.by_backend}
        document["search"]["best_bound_s"] = self.search.best_bound_s
        document["search"]["gap"] = self.search.gap
        for plan in (document["best"], *document["alternatives"], *filter(None, document["by_backend"].values())):
            plan["estimate"].setdefault("cost_per_million_tokens", None)
        return document
