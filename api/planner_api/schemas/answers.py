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
    """The same in a sentence."""
    backend: str
    """Framework that is searched."""
    candidates: int
    """Legal candidates met so far."""
    solved: int
    """Constraint models solved so far."""
    best_step_time_s: float | None = None
    """Step time of the best plan so far, s; null: there is none."""
    bound_s: float | None = None
    """No plan of this framework can have a shorter step, s."""


class PlanLinks(Spec):
    self: str
    """The plan."""
    result: str
    """Its plan document."""
    artifacts: str
    """The files that start the job."""


class PlanJob(Spec):
    """A plan that was asked for.

    ``outcome`` is there when ``state`` is ``succeeded``: a plan, or ``problem`` says why there is none (nothing fits,
    the rules of every framework refuse the pins, the time was up)."""

    id: str = Field(pattern="^[0-9a-f]{64}$")
    """The same for the same question, whoever asks."""
    state: State
    """queued and running go on; the others are the end."""
    outcome: Outcome | None = None
    """How a search that succeeded ended: with a plan, with the proof that none fits, or at its time limit without
    one."""
    created_at: str
    """When it was asked for, ISO 8601."""
    started_at: str | None = None
    """When its search began, ISO 8601."""
    finished_at: str | None = None
    """When it ended, ISO 8601."""
    attempts: int = 0
    """Times that its search was begun; a second follows a lost process."""
    progress: PlanProgress | None = None
    """How far the search is; there while it is running."""
    problem: Problem | None = None
    """Why there is no plan."""
    links: PlanLinks
    """Where to look for more."""
    result: PlanDocument | None = None
    """The plan document; there when the outcome is a plan."""


class PlanList(Spec):
    plans: tuple[PlanJob, ...]
    """Without their results, the youngest first."""
    next: str | None = None
    """Link to the next page."""


class Artifact(Spec):
    """One rendered file."""

    name: str
    """Path inside the folder of the job."""
    bytes: int
    """Size."""
    sha256: str
    """SHA-256 of the content, in hexadecimal digits."""
    media_type: str
    """Of the content."""
    href: str
    """Link to the content."""


class ArtifactList(Spec):
    files: tuple[Artifact, ...]
    """Every file."""
    archive: str
    """Link to all of them as a gzipped tar."""
    start: tuple[str, ...]
    """Commands that start the job from the folder of the files."""


class CatalogPage(Spec):
    items: tuple[dict[str, Any], ...]
    """The entries."""
    total: int
    """Entries of the whole list."""
    next: str | None = None
    """Link to the next page."""


class MeasurementsTaken(Spec):
    """What became of the records that were posted."""

    accepted: tuple[str, ...]
    """Ids under which they are kept."""
    known: tuple[str, ...]
    """Ids of records that were there already."""


class MeasurementList(Spec):
    items: tuple[dict[str, Any], ...]
    """Each with its id and the record as it was sent, the youngest first."""
    next: str | None = None
    """Link to the next page."""


class Health(Spec):
    status: Literal["ok"]
    """Always ok: a process that does not live does not answer."""
    version: str
    """Of the planner."""


class Readiness(Spec):
    """Whether plans can be made; ``checks`` names what fails."""

    ready: bool
    """Every check is ok."""
    checks: dict[str, str]
    """Part of the service -> ok, or what is wrong with it."""
