"""What is to be trained, on how much data a step, and what counts as best."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec

Precision = Literal["bf16", "fp16", "fp8", "nvfp4", "fp32"]
Objective = Literal["throughput", "memory", "cost"]
Loss = Literal["auto", "eager", "fused", "chunked"]


class Job(Spec):
    """One training job, independent of model and machines."""

    seq_len: int = Field(gt=0, le=100_000_000)
    """Tokens of one training sequence."""
    global_batch: int = Field(gt=0, le=100_000_000)
    """Sequences of one optimizer step."""
    precision: Precision = "bf16"
    """Number format of the matrix multiplications (fp8 keeps 16-bit weights and fp32 master weights)."""
    loss: Loss = "auto"
    """How logits become a loss; auto is what the framework does by default."""
    flash_attention: bool = True
    """Attention never materialises the score matrix; false adds it to memory and traffic."""
    objective: Objective = "throughput"
    memory_margin: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the usable memory to keep free on top of the estimate's own uncertainty."""

    @property
    def narrow(self) -> bool:
        """Matrix multiplications run in 8 or 4 bits."""
        return self.precision in ("fp8", "nvfp4")

    @property
    def narrow_share(self) -> float:
        """Bytes of a quantised activation over its 16 bits (nvfp4: half a byte and a scale for every 16 elements)."""
        return {"fp8": 0.5, "nvfp4": 0.28}.get(self.precision, 1.0)
