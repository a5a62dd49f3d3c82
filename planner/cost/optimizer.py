"""Time of the optimizer step per parameter that a rank updates, on the GPU or, offloaded, on the host.

The GPU step streams master weights, moments and gradients; the host step is bound by DRAM, shared by the ranks of a
node, with gradients down and parameters up the host link (and optimizer states over NVMe when they live there)."""

from __future__ import annotations

import numpy as np

from planner.cost.context import CostContext, Work
from planner.specs.batch import DEVICES, FloatArray
from planner.specs.cluster import Cluster

_GPU_BYTES_PER_PARAM = 38.0
"""Adam reads 16 and writes 14 bytes, the gradient norm reads 4, zeroing writes 4."""
_CPU_BYTES_PER_PARAM = 30.0
"""Adam in DRAM: 16 read, 14 written."""
_NVME_BYTES_PER_PARAM = 24.0
"""Master weights and moments read and written, 12 each way."""
_LINK_BYTES_PER_PARAM = 6.0
"""Gradients down (4), updated 16-bit parameters up (2)."""
_NVME = DEVICES.index("nvme")


def host_link_bytes_per_s(cluster: Cluster) -> float:
    """What one GPU moves over its host link in one direction."""
    link = cluster.accelerator.host_link
    return link.measured_bytes_per_s or 0.8 * link.bytes_per_s


def gpu_step_s(context: CostContext, updated: FloatArray) -> FloatArray:
    """Seconds to update ``updated`` parameters (those whose optimizer states the rank holds)."""
    bandwidth = context.device_bytes_per_s * context.constants.optimizer_traffic_share
    return _GPU_BYTES_PER_PARAM * updated / bandwidth


def host_step_s(context: CostContext, updated: FloatArray) -> FloatArray:
    """Seconds of the host's optimizer step where every rank of a node has ``updated`` parameters there."""
    node_params = updated * context.cluster.local_gpus
    return _CPU_BYTES_PER_PARAM * node_params / context.constants.cpu_adam_bytes_per_s


def offload_extra_s(work: Work, updated: FloatArray) -> FloatArray:
    """What offloading the whole optimizer adds: host step and transfers, less the GPU step it replaces."""
    context = work.context
    cluster = context.cluster
    node_params = updated * cluster.local_gpus
    host = host_step_s(context, updated)
    transfer = _LINK_BYTES_PER_PARAM * updated / host_link_bytes_per_s(cluster)
    if cluster.nvme_bytes_per_s is not None:
        host = host + np.where(
            work.batch.offload_device == _NVME, _NVME_BYTES_PER_PARAM * node_params / cluster.nvme_bytes_per_s, 0.0
        )
    return host + transfer - gpu_step_s(context, updated)
