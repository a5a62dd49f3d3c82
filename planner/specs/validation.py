"""A short real run of a plan: what every process is told, what it measured, and how that compares with the estimate.

``RunConfig`` is the file that all processes of a run read, ``RankResult`` the file that each of them writes, and
``ValidationReport`` the document that ``planner validate`` prints, with the measurements beside the prediction."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from planner.specs.base import Spec
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.plan import Estimate, Request
from planner.specs.strategy import Strategy

RUN_SCHEMA_VERSION = 1

RunDevice = Literal["cpu", "cuda"]
RunMode = Literal["run", "proxy", "memory-only", "framework"]
"""The whole plan on as many devices; one rank's work on one device; one rank's memory without allocating any; the
framework's own program on the rendered files."""
MemoryTerm = Literal["weights", "gradients", "optimizer", "activations", "buffers"]
"""What is alive at the peak of a rank: sharded parameters, their gradients, optimizer states, tensors saved for the
backward pass, and the rest (gathered parameters, communication buffers, temporaries)."""
GroupKind = Literal["tp", "cp", "dp", "pp", "ep", "world"]
FailureKind = Literal["out-of-memory", "timeout", "killed", "mismatch", "interrupted", "error"]
Origin = Literal["measured", "modelled"]


class RunConfig(Spec):
    """What to train and how; ``strategy`` is one of the ``pytorch`` backend."""

    schema_version: int = RUN_SCHEMA_VERSION
    model: ModelSpec
    cluster: Cluster
    """The machines that the plan is for."""
    job: Job
    strategy: Strategy
    device: RunDevice
    warmup_steps: int = Field(default=3, ge=0, le=10_000)
    measured_steps: int = Field(default=5, ge=1, le=10_000)
    check_gradients: bool = True
    """First train a tiny copy of the model under the same plan and compare its gradients with an unsharded copy."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait in one collective before the run is given up."""
    threads: int = Field(default=1, ge=1, le=4096)
    """CPU threads of each process."""
    seed: int = 0


class StepMeasure(Spec):
    """One optimizer step of one rank."""

    seconds: float = Field(gt=0)
    forward_backward_s: float = Field(ge=0)
    """All micro-batches, their communication included."""
    optimizer_s: float = Field(ge=0)
    """Gradient norm, clipping and update."""
    loss: float | None = None
    """Mean over the global batch, on ranks that know it."""
    gradient_norm: float | None = None


class CollectiveUse(Spec):
    """One kind of collective on one kind of group in one step of one rank."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, send, recv, broadcast ..."""
    group: GroupKind
    calls: int = Field(ge=0)
    sent_bytes: int = Field(ge=0)
    """Size of the input tensors of all calls."""
    seconds: float | None = Field(default=None, ge=0)
    """From issue to completion, all calls together; null where it cannot be told."""


class GradientCheck(Spec):
    """Gradients of a tiny copy of the model under the plan against an unsharded copy on the same data, fp32."""

    parameters: int = Field(ge=0)
    largest_relative_error: float = Field(ge=0)
    """max |parallel - single| / max |single| of the worst parameter."""
    worst_parameter: str = ""
    gradient_norm: float
    reference_norm: float
    tolerance: float = 1e-4

    @property
    def passed(self) -> bool:
        return self.largest_relative_error <= self.tolerance


class RankFailure(Spec):
    """Why a rank did not finish."""

    rank: int | None = None
    kind: FailureKind
    phase: str
    """What it was doing: start, gradient check, warm-up step 2, step 4 ..."""
    message: str
    details: str = ""
    """Last lines of the traceback or of the process's output."""


class RankResult(Spec):
    """What one process measured."""

    schema_version: int = RUN_SCHEMA_VERSION
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    coordinates: dict[str, int] = Field(default_factory=dict)
    """Index in every group: tp, cp, dp, pp, ep."""
    host: str = ""
    device_name: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    parameters: int = Field(default=0, ge=0)
    """Elements of the parameters that this rank holds."""
    steps: tuple[StepMeasure, ...] = ()
    """The measured steps, warm-up left out."""
    warmup: tuple[StepMeasure, ...] = ()
    peak_allocated_bytes: int | None = Field(default=None, ge=0)
    """Largest sum of live tensors in a step."""
    peak_reserved_bytes: int | None = Field(default=None, ge=0)
    """What the caching allocator held (GPUs only)."""
    memory: dict[MemoryTerm, int] = Field(default_factory=dict)
    """By term at the peak; sums to the peak of the observed step."""
    collectives: tuple[CollectiveUse, ...] = ()
    gradients: GradientCheck | None = None
    failure: RankFailure | None = None


class Comparison(Spec):
    """A predicted figure beside what was measured."""

    name: str
    predicted: float
    measured: float | None = None
    low: float | None = None
    """Stated range of the prediction."""
    high: float | None = None
    spread: float | None = None
    """Half of the interquartile range of the measurement over its median."""
    origin: Origin = "measured"
    suspect: str = ""
    """What to look at first where the two differ; empty where they do not."""

    @model_validator(mode="before")
    @classmethod
    def _as_stated(cls, data: Any) -> Any:
        """The document also says what follows from the fields; read back, it follows again."""
        derived = ("error", "within")
        return {name: value for name, value in data.items() if name not in derived} if isinstance(data, dict) else data

    @property
    def error(self) -> float | None:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1.0 if self.measured else None

    @property
    def within(self) -> bool:
        """Measured inside the stated range."""
        if self.measured is None or self.low is None or self.high is None:
            return False
        return self.low <= self.measured <= self.high


class RunEnvironment(Spec):
    """Where and with what it ran."""

    device: str
    devices: int
    hosts: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)


class ValidationReport(Spec):
    """The result of ``planner validate``."""

    schema_version: int = RUN_SCHEMA_VERSION
    planner_version: str
    created: str
    mode: RunMode
    plan_id: str
    planned_for: str
    """Backend of the plan."""
    request: Request
    strategy: Strategy
    """What ran, in the words of the runner."""
    changed: tuple[str, ...] = ()
    """How that differs from the plan."""
    estimate: Estimate
    """Of what ran."""
    environment: RunEnvironment
    step_time: Comparison | None = None
    peak_memory: Comparison | None = None
    time_terms: tuple[Comparison, ...] = ()
    memory_terms: tuple[Comparison, ...] = ()
    collectives: tuple[CollectiveUse, ...] = ()
    gradients: GradientCheck | None = None
    losses: tuple[float, ...] = ()
    ranks: tuple[RankResult, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    verdict: Literal["within", "outside", "failed"]
    suspects: tuple[str, ...] = ()
    """First suspects of every gap, largest first."""
    notes: tuple[str, ...] = ()
    """What was measured and what was modelled, and what the run cannot say."""
