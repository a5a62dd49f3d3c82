"""Measurement of one machine: what every process is told to time, and what each of them found."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.benchmark import Benchmark
from planner.specs.validation import RunConfig, StepMeasure

BENCHMARK_SCHEMA_VERSION = 1


class BenchmarkConfig(Spec):
    """The file that all processes of a measurement read."""

    schema_version: int = BENCHMARK_SCHEMA_VERSION
    device: Literal["cpu", "cuda"]
    benchmarks: tuple[Benchmark, ...]
    visits: int = Field(default=3, ge=1, le=100)
    """Passes through all benchmarks."""
    repeats: int = Field(default=3, ge=1, le=1000)
    """Timed batches of executions of each at a visit; every process starts each of them at the same time."""
    batch_s: float = Field(default=0.02, gt=0)
    """About how long such a batch takes."""
    threads: int = Field(default=1, ge=1, le=4096)
    """CPU threads of each process."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait in one collective."""
    runs: tuple[RunConfig, ...] = ()
    """Short training runs of as many ranks, after the benchmarks."""


class Timing(Spec):
    """What one process found for one benchmark: a time, or why there is none."""

    seconds: float | None = Field(default=None, gt=0)
    """Median over the repeats of one execution."""
    spread: float = Field(default=0.0, ge=0)
    """Half of the interquartile range over the median."""
    repeats: int = Field(default=0, ge=0)
    reason: str = ""
    """Why it could not be timed; empty where it was."""


class BenchmarkResult(Spec):
    """The file that one process writes; ``timings`` in the order of the configuration."""

    schema_version: int = BENCHMARK_SCHEMA_VERSION
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    host: str = ""
    device_name: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    runs: tuple[tuple[StepMeasure, ...], ...] = ()
    """Measured steps of every training run."""
