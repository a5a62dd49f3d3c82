"""What an existing training configuration says, in the planner's words; a field is None where it says nothing.

Readers fill it from one framework's files; they decide nothing: whether it is legal, fits or is fast is for the service
that prices it by the same rules and cost model as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.specs.finding import Finding
from planner.specs.job import Loss, Precision, Task
from planner.specs.model import ModelSpec
from planner.specs.strategy import Offload, Recompute, Schedule

Files = Mapping[str, str]
"""Name (relative path) -> text of the files that make up one configuration; most have one."""


@dataclass(frozen=True, kw_only=True)
class StatedStrategy:
    """The strategy as far as it is stated (``planner.specs.strategy.Strategy`` describes the fields)."""

    tp: int | None = None
    sequence_parallel: bool | None = None
    cp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    pipeline_schedule: Schedule | None = None
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each of the pp * vpp virtual stages, in model order."""
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    zero_stage: int | None = None
    shard_degree: int | None = None
    secondary_shard_degree: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    recompute: Recompute | None = None
    """In the framework's own module names."""
    offload: Offload | None = None

    @property
    def model_ranks(self) -> int:
        """GPUs of one replica: tp * cp * pp, each 1 where it is not stated."""
        return (self.tp or 1) * (self.cp or 1) * (self.pp or 1)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration of one framework."""

    format: str
    """What was recognised, for people: ``Megatron-LM arguments in a shell script``."""
    backend: str
    """Name of the backend whose rules and cost model apply."""
    model: ModelSpec | None = None
    """Where the file states dimensions."""
    model_name: str | None = None
    """Where it only names the model: a flavor, a Hugging Face name, a path."""
    gpus: int | None = None
    gpus_per_node: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    """Sequences of one step."""
    precision: Precision | None = None
    loss: Loss | None = None
    flash_attention: bool | None = None
    task: Task | None = None
    whole_copies: bool = False
    """Every process reads the whole model into host memory before it is split or moved to the GPU."""
    strategy: StatedStrategy = StatedStrategy()
    habits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the backend's habits that the file sets to something else than a plan would."""
    findings: tuple[Finding, ...] = ()
    """What can be said from the file alone: unreadable values, removed or misspelt keys, contradictions."""
    unread: tuple[str, ...] = ()
    """Settings that bear on speed or memory and are not modelled, or whose value could not be read."""


def product(*factors: int | None) -> int | None:
    """Of degrees or batch sizes; None where one of them is not known."""
    total = 1
    for value in factors:
        if value is None:
            return None
        total *= value
    return total


class Reader(Protocol):
    """One format."""

    name: str
    """Stable, kebab-case: ``megatron-arguments``."""
    title: str

    def recognises(self, files: Files) -> bool:
        """Whether these files are of this format, by cheap and certain marks."""

    def read(self, files: Files) -> Configuration:
        """The configuration; InputError with file, line and reason where it cannot be read at all."""
