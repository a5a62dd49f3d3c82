"""What is to be trained, on how much data a step, and what counts as best."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec

Precision = Literal["bf16", "fp16", "fp8", "nvfp4", "fp32"]
Objective = Literal["throughput", "memory", "cost"]
Loss = Literal["auto", "eager", "fused", "chunked"]
Task = Literal["pretrain", "sft", "lora"]

LoraTargets = Literal["all", "qkv"]

LORA_RANK = 32
"""Rank of the adapters when nobody names one: the default of NeMo and Megatron-Bridge, which also put an adapter beside
every linear layer of a block (NVIDIA-NeMo/Megatron-Bridge, peft/lora.py)."""


class Job(Spec):
    """One training job, independent of model and machines."""

    seq_len: int = Field(gt=0, le=100_000_000)
    """Tokens of one training sequence."""
    global_batch: int = Field(gt=0, le=100_000_000)
    """Sequences of one optimizer step."""
    sample_tokens: int | None = Field(default=None, gt=0, le=100_000_000)
    """Each sequence is packed from samples of about this many tokens, which do not attend to each other; absent: it is
    one sample."""
    precision: Precision = "bf16"
    """Number format of the matrix multiplications (fp8 keeps 16-bit weights and fp32 master weights)."""
    task: Task = "pretrain"
    """What is trained: all weights from scratch, all weights of a finished model, or low-rank adapters (LoRA,
    arXiv 2106.09685) beside its frozen weights."""
    lora_rank: int = Field(default=LORA_RANK, gt=0, le=65_536)
    """Inner width of the adapters of a lora job."""
    lora_targets: LoraTargets = "all"
    """Which matrices have an adapter: every linear layer of a block, or only query, key and value."""
    loss: Loss = "auto"
    """How logits become a loss; auto is what the framework does by default."""
    flash_attention: bool = True
    """Attention never materialises the score matrix; false adds it to memory and traffic."""
    objective: Objective = "throughput"
    """What counts as best: time, memory, or US dollars."""
    memory_margin: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the usable memory to keep free on top of the estimate's own uncertainty."""

    @property
    def narrow(self) -> bool:
        """Matrix multiplications run in 8 or 4 bits."""
        return self.precision in ("fp8", "nvfp4")

    @property
    def compute_bytes(self) -> float:
        """Bytes of an activation, and of a weight as it is multiplied or gathered; narrow formats cast theirs from 16
        bits."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def narrow_share(self) -> float:
        """Bytes of a quantised activation over its 16 bits (nvfp4: half a byte and a scale for every 16 elements)."""
        return {"fp8": 0.5, "nvfp4": 0.28}.get(self.precision, 1.0)

    @property
    def attended_tokens(self) -> int:
        """Tokens that attend to each other."""
        return min(self.sample_tokens or self.seq_len, self.seq_len)

    @property
    def frozen(self) -> bool:
        """The model's own weights get no gradients; adapters beside them do."""
        return self.task == "lora"
