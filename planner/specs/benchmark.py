"""Small measurements of one machine: what every process is told to time, and what each of them found.

A benchmark names a piece of work that the cost model has a formula for; its time is that of one execution."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.job import Precision

BENCHMARK_SCHEMA_VERSION = 1

BenchmarkKind = Literal[
    "gemm forward",
    "gemm input gradient",
    "gemm weight gradient",
    "attention forward",
    "attention backward",
    "copy",
    "elementwise",
    "loss",
    "block",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "send",
    "optimizer",
    "cpu optimizer",
    "host to device",
    "device to host",
]
"""y = x W and its two gradients; causal attention; a copy in device memory; norms, residuals, rotary position and gated
activation of a layer, forward and backward; the loss, forward and backward; a transformer block so small that only the
host works; collectives and a transfer between two ranks; norm, clipping and fused AdamW where the parameters are, AdamW
in host memory; copies over the host link."""

COLLECTIVES: tuple[BenchmarkKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
"""Kinds that several ranks do together."""


LEAST_SIZE = 2
"""Largest size of a benchmark that only shows what it takes to issue the work (the width of a head is even)."""


class Benchmark(Spec):
    """One piece of work; ``shape`` holds its sizes, in elements or bytes."""

    kind: BenchmarkKind
    shape: dict[str, int]
    """tokens, inputs, outputs (matrices); batch, heads, length, width (attention); bytes (copies, collectives: of the
    gathered tensor, of what is sent by one rank in an exchange); tokens and dimensions (elementwise, block);
    tokens, vocab (loss); parameters (optimizer)."""
    precision: Precision = "fp32"
    ranks: int = Field(default=1, ge=1)
    """Size of the group; groups of contiguous ranks fill the world and work at the same time."""

    @property
    def smallest(self) -> bool:
        """Whether it is of single elements, so that its time is that of issuing it."""
        return all(size <= LEAST_SIZE for size in self.shape.values())

    @property
    def label(self) -> str:
        """The shape in a few words: ``tokens 512 inputs 256 outputs 256 fp32``."""
        sizes = " ".join(f"{name} {value}" for name, value in self.shape.items())
        return f"{sizes} {self.precision}" + (f" over {self.ranks}" if self.ranks > 1 else "")


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
