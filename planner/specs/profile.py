"""A machine profile: how somebody's own runs, or measurements of the machine itself, differ from the published
constants of one accelerator.

``planner calibrate`` writes it as YAML, ``--profile`` reads it; it travels inside the plan document, so that a plan can
be estimated again as it was made."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from planner.specs.accuracy import RecordProblem
from planner.specs.base import Spec
from planner.specs.benchmark import Benchmark

PROFILE_SCHEMA_VERSION = 1


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("text must be printable")
    return text


LEAST_FACTOR, MOST_FACTOR = 0.02, 50.0
Factor = Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR, strict=True)]
"""A multiplier on a published value; a number in quotes is a mistake of the file."""
Word = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]


class ProfileRun(Spec):
    """One run that a profile rests on, with the relative error (predicted / measured - 1) of its step time."""

    id: str
    """Of the record."""
    measured_step_time_s: float | None = None
    """Step time of the run, s."""
    error_before: float | None = None
    """With the published constants."""
    error_after: float | None = None
    """With the profile."""
    error_left_out: float | None = None
    """With a profile fitted to the other runs only; null where there are no others."""
    measured_peak_memory_bytes: float | None = None
    """Peak memory of the run."""
    memory_error_before: float | None = None
    """Error of the peak memory with the published constants."""
    memory_error_after: float | None = None
    """Error of the peak memory with the profile."""


class CalibratedFactor(Spec):
    """One thing that was fitted: a factor on every constant that describes it."""

    name: str
    """Constant that it multiplies, or memory."""
    meaning: str
    """What the factor says, in words."""
    factor: Factor
    """On a rate: above 1 is faster; on a time or on memory: above 1 is more."""
    low: float
    """Lower end of the factor's range."""
    high: float
    """What is plausible; a fit that ends outside is refused."""
    determined: float = Field(ge=0, le=1)
    """How much the runs say about it: 0 the value is the prior's, 1 it is the runs' alone."""


class MachineMeasurement(Benchmark):
    """One thing that was timed on the machine, beside what the cost model says of it."""

    seconds: float = Field(gt=0)
    """Median of the slowest process."""
    spread: float = Field(ge=0)
    """Half of the interquartile range over the median."""
    repeats: int = Field(ge=1)
    """How often it was timed."""
    published_s: float | None = None
    """By the published constants; null where the cost model does not price it."""
    fitted_s: float | None = None
    """With the profile."""


class Profile(Spec):
    """Factors on the published constants of one accelerator."""

    schema_version: int = PROFILE_SCHEMA_VERSION
    """Version of this document's form."""
    planner_version: str
    """Version of the planner that wrote it."""
    created: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Day on which it was written, YYYY-MM-DD."""
    accelerator: Word
    """Catalogue id; the profile is refused for any other."""
    framework: Word
    """As the runs name it."""
    factors: dict[str, Factor] = Field(default_factory=dict)
    """Multiplies the constant of that name (planner/cost/constants.yaml)."""
    memory_factor: Factor = 1.0
    """Multiplies the peak memory of a rank (before context and communication buffers)."""
    fitted: tuple[CalibratedFactor, ...] = ()
    """The factors with their ranges."""
    runs: tuple[ProfileRun, ...] = ()
    """Runs that it rests on."""
    measurements: tuple[MachineMeasurement, ...] = ()
    """What was timed on the machine itself; empty for a profile of runs."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the software that was timed: python, torch ..."""
    processes: int | None = Field(default=None, ge=1)
    """Processes that worked at the same time while the machine was measured."""


class MachineCalibration(Spec):
    """The result of ``planner calibrate --on-this-machine``: the profile and how well it describes the machine."""

    profile: Profile
    device_name: str
    host: str
    residuals: dict[str, float] = Field(default_factory=dict)
    """By kind of benchmark, the median of |predicted / measured - 1| with the profile."""
    not_measured: dict[str, str] = Field(default_factory=dict)
    """Reason by benchmark."""
    warnings: tuple[str, ...] = ()


class Calibration(Spec):
    """The result of ``planner calibrate``: the profile and what it rests on."""

    profile: Profile
    median_before: float
    """Median absolute step-time error of the runs with the published constants."""
    median_after: float
    median_left_out: float | None
    """The same where every run is predicted by a profile of the others; null with a single run."""
    not_fitted: tuple[str, ...] = ()
    """What more runs would allow to fit, and how many it takes."""
    warnings: tuple[str, ...] = ()
    problems: tuple[RecordProblem, ...] = ()
    skipped: dict[str, str] = Field(default_factory=dict)
    """Reason by id of runs that could not be used."""
