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
    """What the quantity is."""
    value: float
    """Bytes or seconds, as the root of the tree says."""
    combine: Literal["leaf", "sum", "max"] = "leaf"
    """How the value follows from the children; leaf: there are none."""
    children: tuple[Breakdown, ...] = ()
    """What it is made of."""
    source: str = ""
    """Formula or measurement a leaf comes from."""


class Estimate(Spec):
    """What the cost model says of one strategy."""

    step_time_s: float = Field(gt=0)
    """Time of one optimizer step, s."""
    step_time_range_s: tuple[float, float]
    """Least and most that the step may take, s."""
    tokens_per_s: float = Field(ge=0)
    """Tokens of all GPUs together."""
    tokens_per_s_per_gpu: float = Field(ge=0)
    """Tokens of one GPU."""
    model_flops_per_s_per_gpu: float = Field(ge=0)
    """Model FLOPs (6 per used weight and token, causal attention counted once) without recomputation."""
    mfu: float = Field(ge=0)
    """model_flops_per_s_per_gpu over the dense peak of the 16-bit format (of the fp8 format for fp8 jobs)."""
    peak_memory_bytes: float = Field(gt=0)
    """Worst rank, worst phase, as the device reports it (allocator, context and communication buffers)."""
    peak_memory_range_bytes: tuple[float, float]
    """Least and most that the peak may be."""
    range_basis: str = ""
    """What the two ranges rest on: measured runs of the same class, or that there are none."""
    memory_limit_bytes: float = Field(gt=0)
    """What an allocator can reach on one GPU, less the margin that was asked for."""
    fits: bool
    """The upper end of the memory range is within the limit, on the GPU and on the host."""
    host_memory_bytes_per_node: float = Field(ge=0)
    """Host memory that the job takes on a node."""
    memory: Breakdown
    """What the peak is made of, bytes."""
    time: Breakdown
    """What the step time is made of, s."""
    cost_per_million_tokens: float | None = None
    """US dollars, when a price per GPU-hour is known."""


class Plan(Spec):
    """A strategy for one backend with its estimate and the reasons for it."""

    backend: str
    """Framework that runs it."""
    strategy: Strategy
    """How the job is split."""
    estimate: Estimate
    """What it takes."""
    why: tuple[str, ...] = ()
    """Reasons for its choices, in sentences."""


class Assumption(Spec):
    """Something the user did not say and the planner filled in."""

    field: str
    """Place in the question, such as job.seq_len."""
    value: Any
    """What was taken."""
    why: str
    """Where the value comes from."""


class Request(Spec):
    """The normalised question."""

    model: ModelSpec
    """What is trained."""
    cluster: Cluster
    """The machines."""
    job: Job
    """On how much data, and what counts as best."""
    backend: str = "auto"
    """A framework, or auto for all of them."""
    pins: dict[str, int | str | bool] = Field(default_factory=dict)
    """Values of the strategy that the search must keep."""
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
    """Legal candidates that were met."""
    rejected: dict[str, int] = Field(default_factory=dict)
    """Candidates refused by each rule."""
    solved: int = 0
    """Constraint models solved."""
    seconds: float = 0.0
    """Time of the search, s."""


class PlanDocument(Spec):
    """The whole result of suggest or estimate."""

    schema_version: int = SCHEMA_VERSION
    """Version of this document's form."""
    planner_version: str
    """Version of the planner that wrote it."""
    id: str
    """SHA-256 of the normalised request and the catalogue version."""
    request: Request
    """The question as it was understood."""
    assumptions: tuple[Assumption, ...] = ()
    """What was not said and had to be filled in."""
    warnings: tuple[str, ...] = ()
    """What to know before relying on it."""
    best: Plan
    """The plan."""
    alternatives: tuple[Plan, ...] = ()
    """The next best plans, the best first."""
    by_backend: dict[str, Plan | None] = Field(default_factory=dict)
    """The best plan of each framework; null: it was tried and has none."""
    search: SearchReport
    """How the plan was found."""

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
