"""One way to run a job: the degrees of every kind of parallelism, sharding, recomputation and offload.

``Strategy`` is the document form (plan.json, the API); ``StrategyBatch`` in batch.py is the array form that the cost
model evaluates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from planner.specs.base import Spec
from planner.specs.job import Precision

Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
"""Pipeline schedules known to the cost model; "none" is a single stage."""

RecomputeMode = Literal["none", "selective", "full"]
OffloadDevice = Literal["none", "cpu", "nvme"]


class Recompute(Spec):
    """Which activations are thrown away in the forward pass and computed again in the backward pass."""

    mode: RecomputeMode = "none"
    """Nothing, some modules of a layer, or whole layers."""
    modules: tuple[str, ...] = ()
    """For selective mode: the framework's own module names."""
    layers_per_stage: tuple[int, ...] | None = None
    """For full mode: recomputed layers of each virtual stage; absent means every layer."""

    @model_validator(mode="after")
    def _nothing_without_mode(self) -> Recompute:
        if self.mode == "none" and (self.modules or self.layers_per_stage is not None):
            raise ValueError("recompute.mode(none) has neither modules nor layers_per_stage")
        return self


class Offload(Spec):
    """What lives in host memory (or on NVMe) instead of on the GPU."""

    optimizer: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the optimizer states."""
    parameters: OffloadDevice = "none"
    """Where the weights are kept."""
    device: OffloadDevice = "none"
    """Where the optimizer states go."""

    @model_validator(mode="after")
    def _device_named(self) -> Offload:
        if (self.optimizer > 0) != (self.device != "none"):
            raise ValueError(
                f"offload.optimizer({self.optimizer:g}) and offload.device({self.device}) contradict each other"
            )
        return self


class Strategy(Spec):
    """A complete assignment; tp * pp * cp * dp is the number of GPUs."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""
    sequence_parallel: bool = False
    """Activations outside the tensor-parallel matrices are split over the tp ranks too (Megatron sequence
    parallelism)."""
    cp: int = Field(default=1, ge=1)
    """Ranks that share one sequence (context parallelism; DeepSpeed: Ulysses)."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    vpp: int = Field(default=1, ge=1)
    """Virtual stages (model chunks) of one pipeline rank."""
    pipeline_schedule: Schedule = "none"
    """Order of the micro-batches in the pipeline."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each of the pp * vpp virtual stages in model order; virtual stage k runs on pipeline rank k mod
    pp."""
    ep: int = Field(default=1, ge=1)
    """Ranks over which the experts of one layer are spread."""
    etp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks of one expert."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters."""
    shard_degree: int = Field(default=1, ge=1)
    """GPUs over which the sharded states of dense weights are spread (at most dp * cp)."""
    secondary_shard_degree: int | None = Field(default=None, ge=2)
    """GPUs that hold a second, nearer copy of the parameters (DeepSpeed hpZ)."""
    micro_batch: int = Field(default=1, ge=1)
    """Sequences of one micro-batch on one data-parallel replica."""
    grad_accum: int = Field(default=1, ge=1)
    """Micro-batches of one step on one data-parallel replica."""
    global_batch: int = Field(ge=1)
    """Sequences of one step."""
    seq_len: int = Field(ge=1)
    """Tokens of one sequence."""
    precision: Precision = "bf16"
    """Number format of the matrix multiplications."""
    recompute: Recompute = Recompute()
    """Activations that are computed again."""
    offload: Offload = Offload()
    """What lives on the host."""

    @property
    def gpus(self) -> int:
        """GPUs the strategy occupies."""
        return self.tp * self.pp * self.cp * self.dp
