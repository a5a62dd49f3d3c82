"""What is answered: jobs with their state, artifacts, lists and the state of the service."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.plan import PlanDocument
from planner_api.problems import Problem

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Outcome = Literal["plan", "infeasible", "refused", "time-limit"]


class PlanProgress(Spec):
    """How far a search is."""

    text: str
    backend: str
    candidates: int
    solved: int
    best_step_time_s: float | None = None
    bound_s: float | None = None


class PlanLinks(Spec):
    self: str
    result: str
    artifacts: str


class PlanJob(Spec):
    """A plan that was asked for.

    ``outcome`` is there when ``state`` is ``succeeded``: a plan, or ``problem`` says why there is none (nothing fits,
    the rules of every framework refuse the pins, the time was up)."""

    id: str = Field(pattern="^[0-9a-f]{64}$")
    state: State
    outcome: Outcome | None = None
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    attempts: int = 0
    progress: PlanProgress | None = None
    problem: Problem | None = None
    links: PlanLinks
    result: PlanDocument | None = None


class PlanList(Spec):
    plans: tuple[PlanJob, ...]
    next: str | None = None
    """Link to the next page."""


class Artifact(Spec):
    """One rendered file."""

    name: str
    bytes: int
    sha256: str
    media_type: str
    href: str


class ArtifactList(Spec):
    files: tuple[Artifact, ...]
    archive: str
    """Link to all of them as a gzipped tar."""
    start: tuple[str, ...]
    """Commands that start the job from the folder of the files."""


class CatalogPage(Spec):
    items: tuple[dict[str, Any], ...]
    total: int
    next: str | None = None


class MeasurementsTaken(Spec):
    """What became of the records that were posted."""

    accepted: tuple[str, ...]
    """Ids under which they are kept."""
    known: tuple[str, ...]
    """Ids of records that were there already."""


class MeasurementList(Spec):
    items: tuple[dict[str, Any], ...]
    next: str | None = None


class Health(Spec):
    status: Literal["ok"]
    version: str


class Readiness(Spec):
    """Whether plans can be made; ``checks`` names what fails."""

    ready: bool
    checks: dict[str, str]
