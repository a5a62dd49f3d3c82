"""The constants of the cost model, looked up for one framework on one accelerator.

Values, meaning, unit and evidence stand in constants.yaml; a table can carry other values (while a fit looks for
better ones) and factors (a machine profile that somebody calibrated)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.catalog.loader import read_yaml
from planner.specs.cluster import Accelerator


@dataclass(frozen=True)
class Constants:
    """Constants as floats; units are in the names, shares are dimensionless (see constants.yaml for the evidence)."""

    gemm_share: float
    gemm_share_fp8: float
    gemm_share_fp4: float
    block_scaled_share: float
    gemm_half_k: float
    gemm_half_mn: float
    attention_forward_share: float
    attention_backward_share: float
    flash2_attention_factor: float
    attention_half_length: float
    attention_half_blocks_per_sm: float
    attention_half_width: float
    stream_share: float
    eager_traffic_factor: float
    launch_s: float
    tensor_parallel_launch_factor: float
    sharding_launch_factor: float
    blocking_launch_s: float
    staged_collective_host_s: float
    stage_sync_s: float
    expert_half_tokens: float
    moe_host_s: float
    padded_expert_host_share: float
    narrow_expert_host_factor: float
    tensor_parallel_host_factor: float
    partial_graph_host_share: float
    mixer_host_share: float
    routing_wait_share: float
    expert_overlap_host_factor: float
    expert_overlap_share: float
    natural_routing_peak: float
    scan_share: float
    fabric_bus_share: float
    fabric_half_message_bytes: float
    fabric_latency_s: float
    fabric_hop_s: float
    network_share: float
    network_half_message_bytes: float
    network_half_message_cap_bytes: float
    network_latency_s: float
    network_hop_s: float
    overlap_slowdown: float
    sharded_traffic_slowdown: float
    tensor_overlap_share: float
    reduce_window_share: float
    optimizer_traffic_share: float
    step_overhead_s: float
    straggler_per_log2_gpu: float
    cpu_adam_bytes_per_s: float
    device_context_bytes: float
    communicator_bytes: float


HOST_TIMES = (
    *("launch_s", "blocking_launch_s", "staged_collective_host_s", "stage_sync_s", "moe_host_s"),
    *("step_overhead_s", "fabric_latency_s", "fabric_hop_s"),
)
"""Times that a processor core spends, which ranks on one core spend one after the other."""

Key = tuple[str, str]
"""Name of a constant and the stack, accelerator, architecture or "default" that the value is for."""


@dataclass(frozen=True)
class Fitted:
    """A value that a fit may move: where it starts from and how far the evidence lets it go."""

    value: float
    prior: float
    spread: float
    """Standard deviation of the logarithm around the prior."""


@dataclass(frozen=True)
class ConstantTable:
    """All values; equal tables compare equal only if they are the same object."""

    values: Mapping[str, Mapping[str, float]] = field(compare=False)
    factors: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Multiplies what the look-up finds, by constant."""

    def lookup(self, stack: str, accelerator: Accelerator) -> Constants:
        """Constants of a stack on an accelerator: the stack's own entry, else the accelerator's, its architecture's,
        its architecture's family's, the default."""
        return Constants(**{f.name: self._value(f.name, stack, accelerator) for f in fields(Constants)})

    def _value(self, name: str, stack: str, accelerator: Accelerator) -> float:
        entry = self.values[name]
        architecture = accelerator.architecture
        # "blackwell-ultra" is a Blackwell where nothing of its own is known.
        for key in (stack, accelerator.id, architecture, architecture.partition("-")[0], "default"):
            if key in entry:
                return entry[key] * self.factors.get(name, 1.0)
        raise KeyError(f"constants.yaml: {name} has no default")

    def with_values(self, changes: Mapping[Key, float]) -> ConstantTable:
        """The table with some values replaced."""
        values = {name: dict(entry) for name, entry in self.values.items()}
        for (name, key), value in changes.items():
            values[name][key] = value
        return replace(self, values=values)

    def with_factors(self, factors: Mapping[str, float]) -> ConstantTable:
        """The table of a calibrated machine."""
        return replace(self, factors=dict(factors))


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    document: dict[str, Any] = read_yaml(Path(__file__).with_name("constants.yaml"))["constants"]
    return document


@lru_cache(maxsize=1)
def published_constants() -> ConstantTable:
    """The values of constants.yaml."""
    values = {
        name: {
            key: float(value["value"] if isinstance(value, dict) else value) for key, value in entry["values"].items()
        }
        for name, entry in _document().items()
    }
    return ConstantTable(values)


def meaning_of(name: str) -> tuple[str, str]:
    """(unit, meaning) of a constant."""
    entry = _document()[name]
    return str(entry["unit"]), str(entry["meaning"])


def fitted_constants() -> dict[Key, Fitted]:
    """The values that were fitted to public runs, in the order of the file."""
    return {
        (name, key): Fitted(float(value["value"]), float(value["prior"]), float(value["spread"]))
        for name, entry in _document().items()
        for key, value in entry["values"].items()
        if isinstance(value, dict)
    }
