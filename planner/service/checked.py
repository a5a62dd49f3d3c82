"""What is asked about an existing configuration, and everything that is worked out about it on the way to a report.

Filled by ``checking``; advice, diagnosis and conversion read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.cost.context import CostContext
from planner.reading import Configuration
from planner.service.completion import Completed
from planner.service.fit import ABOUT_FIT
from planner.service.requests import ClusterInput, JobInput, StatedModel
from planner.specs.cluster import Cluster
from planner.specs.convert import to_strategy
from planner.specs.finding import Finding
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption, Plan, Request
from planner.specs.profile import Profile
from planner.specs.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What is asked about a configuration; options win over the file."""

    paths: tuple[Path, ...] = ()
    texts: Mapping[str, str] | None = None
    """The files as data, by name: then nothing is read from disk, and a model is named or stated as data."""
    reader: str | None = None
    """Name of the format; None: recognised."""
    model: str | StatedModel | None = None
    cluster: ClusterInput = field(default_factory=ClusterInput)
    job: JobInput = field(default_factory=JobInput)
    profile: Path | Profile | None = None
    recompute: str | None = None
    """As the strategy option has it, where the file does not say or should be overruled."""
    suggest: bool = False
    """Search for the best plan of the same framework, too."""
    advise: bool = True
    """Try single changes."""


@dataclass
class Checked:
    """A configuration with everything that could be worked out about it."""

    configuration: Configuration
    texts: Mapping[str, str]
    """The files by name."""
    findings: list[Finding] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    planned: Request | None = None
    """The question of the plan.json beside the files: what neither they nor the options say is as it was asked."""
    model: ModelSpec | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    completed: Completed | None = None
    context: CostContext | None = None
    """With the backend as the file runs it."""
    plan: Plan | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(self.texts))

    @property
    def strategy(self) -> Strategy | None:
        """What the file says as a strategy, also where the framework refuses it."""
        if self.context is None or self.completed is None or self.completed.batch is None:
            return None
        return to_strategy(self.completed.batch, 0, self.context.recompute_kinds, self.completed.job)

    @property
    def legal(self) -> bool:
        return not any(finding.severity == "error" and finding.id not in ABOUT_FIT for finding in self.findings)

    @property
    def fits(self) -> bool | None:
        if self.plan is None:
            return None
        return self.plan.estimate.fits and not any(finding.id in ABOUT_FIT for finding in self.findings)

    @property
    def request(self) -> Request | None:
        if self.model is None or self.cluster is None or self.completed is None:
            return None
        return Request(
            model=self.model,
            cluster=self.cluster,
            job=self.completed.job,
            backend=self.configuration.backend,
            profile=self.profile,
        )
