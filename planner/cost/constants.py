"""The calibrated constants of the cost model, looked up for one accelerator.

The values, their meaning and their evidence stand in constants.yaml; this module only finds the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.catalog.loader import read_yaml
from planner.specs.cluster import Accelerator


@dataclass(frozen=True)
class Constants:
    """Machine constants as floats; units are in the names, shares are dimensionless (see constants.yaml for the
    evidence)."""

    gemm_share: float
    gemm_share_fp8: float
    gemm_half_k: float
    gemm_half_mn: float
    attention_forward_share: float
    attention_backward_share: float
    flash2_attention_factor: float
    attention_half_length: float
    attention_half_blocks_per_sm: float
    stream_share: float
    eager_traffic_factor: float
    launch_s: float
    expert_half_tokens: float
    moe_host_s: float
    fabric_bus_share: float
    fabric_half_message_bytes: float
    fabric_latency_s: float
    network_share: float
    network_half_message_bytes: float
    network_half_message_cap_bytes: float
    network_latency_s: float
    network_hop_s: float
    overlap_slowdown: float
    optimizer_traffic_share: float
    step_overhead_s: float
    straggler_per_log2_gpu: float
    cpu_adam_bytes_per_s: float
    device_context_bytes: float
    communicator_bytes: float


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    document: dict[str, Any] = read_yaml(Path(__file__).with_name("constants.yaml"))
    return document


def constants_for(accelerator: Accelerator) -> Constants:
    """Constants of this accelerator: its own entry, else its architecture's, else the default."""
    document = _document()

    def value(name: str) -> float:
        entry = document[name]
        for key in (accelerator.id, accelerator.architecture, "default"):
            if key in entry:
                return float(entry[key])
        raise KeyError(f"constants.yaml: {name} has no default")

    return Constants(**{field.name: value(field.name) for field in fields(Constants)})
