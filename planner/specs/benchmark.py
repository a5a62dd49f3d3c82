"""A small piece of work that the cost model has a formula for and that a machine can be timed at."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.job import Precision

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
    """What is timed."""
    shape: dict[str, int]
    """tokens, inputs, outputs (matrices); batch, heads, kv_heads, length, width (attention); bytes (copies,
    collectives: of the gathered tensor, of what is sent by one rank in an exchange); tokens and dimensions
    (elementwise, block); tokens, vocab (loss); parameters (optimizer)."""
    precision: Precision = "fp32"
    """Number format of its operands."""
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
