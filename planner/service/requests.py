"""What a caller asks, as given: every field may be absent, nothing is interpreted yet.

The command line fills these from its options, a library user from keyword arguments; clusters.py, jobs.py and layout.py
turn them into specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.specs.cluster_file import ClusterFile
from planner.specs.profile import Profile
from planner.units import duration

PinValue = int | str | bool
Progress = Callable[[str], None]
"""Told what a running piece of work does."""


@dataclass(frozen=True)
class SearchState:
    """How far a search is."""

    backend: str
    candidates: int = 0
    """Legal candidates met so far."""
    solved: int = 0
    """Constraint models solved."""
    best_step_time_s: float | None = None
    bound_s: float | None = None
    """No plan of this backend can be faster."""

    def __str__(self) -> str:
        if not self.candidates:
            return f"searching {self.backend}"
        if self.best_step_time_s is None or self.bound_s is None:
            return f"searching {self.backend}: {self.candidates:,} candidates, {self.solved} solved"
        best, bound = duration(self.best_step_time_s), duration(self.bound_s)
        return f"searching {self.backend}: best {best} a step, nothing under {bound}, {self.candidates:,} candidates"


SearchProgress = Callable[[SearchState], None]
"""Told how far a search is."""


@dataclass(frozen=True, kw_only=True)
class StatedModel:
    """A model given as data, so that nothing is read from disk; one of the three is set."""

    name: str | None = None
    """Of the catalogue."""
    config: Mapping[str, Any] | None = None
    """Content of a Hugging Face config.json."""
    dimensions: Mapping[str, Any] | None = None
    """Fields of ``planner.specs.model.ModelSpec``."""


@dataclass(frozen=True, kw_only=True)
class ClusterInput:
    """The machines; what is None comes from the cluster file, then from the accelerator's reference system."""

    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    nics: int | None = None
    """NICs of a node."""
    nic_gbps: float | None = None
    """Line rate of one NIC, Gbit/s, one direction."""
    oversubscription: float | None = None
    host_memory_gib: float | None = None
    """Host memory of a node, GiB."""
    price: float | None = None
    """US dollars per GPU-hour."""
    file: Path | ClusterFile | None = None
    """A cluster file or its content; the fields above win over it."""


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """What is trained; ``global_batch`` is sequences (``512``) or, with a suffix, tokens (``4Mi``)."""

    seq_len: int | None = None
    global_batch: str | int | None = None
    precision: str | None = None
    loss: str = "auto"
    flash_attention: bool = True
    objective: str = "throughput"
    memory_margin: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A question to ``suggest``."""

    model: str | StatedModel
    cluster: ClusterInput = field(default_factory=ClusterInput)
    job: JobInput = field(default_factory=JobInput)
    backend: str = "auto"
    pins: tuple[str, ...] = ()
    """``name=value`` texts; several may stand in one text, separated by commas."""
    profile: Path | Profile | None = None
    """Machine profile that ``planner calibrate`` wrote."""
    rule_of_thumb: bool = False
    """Also price what the usual size-based rule would choose, and say how it compares."""
    top: int = 5
    time_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class StrategyInput:
    """A strategy as somebody states it; what is None follows from the rest or is the framework's usual choice."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    zero_stage: int | None = None
    shard_degree: int | None = None
    secondary_shard_degree: int | None = None
    micro_batch: int = 1
    sequence_parallel: bool | None = None
    schedule: str | None = None
    recompute: str = "none"
    """``none``, ``selective``, ``selective:module,module``, ``full`` or ``full:layers of each stage``."""
    offload: str = "none"
    """``none``, ``cpu``, ``nvme`` or ``cpu:share``, with ``+parameters`` to move the weights too."""
    layers_per_stage: str | None = None
    """Comma-separated layers of the pp * vpp virtual stages."""
