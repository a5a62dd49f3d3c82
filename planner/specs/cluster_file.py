"""A cluster as somebody writes it down: what is absent comes from the accelerator's
reference system."""

from __future__ import annotations

from pydantic import Field

from planner.specs.base import Spec

MAX_GPUS = 1_000_000
LEAST = 0.001
"""Least rate (Gbit/s, GB/s) or size (GiB) that is taken; smaller ones are slips, and round to nothing in bytes.
Only a price can be zero: that of one's own machines."""


class ClusterFile(Spec):
    """A cluster in YAML or JSON; options on the command line win over it."""

    gpu: str | None = None
    """Accelerator of `planner gpus`."""
    system: str | None = None
    """Reference system that fills what is not given."""
    gpus: int | None = Field(default=None, gt=0, le=MAX_GPUS)
    """GPUs of the job; or nodes, or both where they agree."""
    nodes: int | None = Field(default=None, gt=0, le=MAX_GPUS)
    """Nodes of the job."""
    gpus_per_node: int | None = Field(default=None, gt=0, le=1024)
    """GPUs of one node (what a launcher calls a node)."""
    domain_gpus: int | None = Field(default=None, gt=0, le=100_000)
    """GPUs joined by the fast links."""
    nics_per_node: int | None = Field(default=None, gt=0, le=1024)
    """NICs of one node."""
    nic_gbps: float | None = Field(default=None, ge=LEAST, le=100_000)
    """Line rate of one NIC, Gbit/s, one direction."""
    oversubscription: float | None = Field(default=None, ge=1, le=1000)
    """How much the network above the node is oversubscribed: 1 is full bisection, 2 halves what leaves a node."""
    memory_gib_per_gpu: float | None = Field(default=None, ge=LEAST, le=100_000)
    """What an allocator can reach on one GPU, GiB."""
    host_memory_gib: float | None = Field(default=None, ge=LEAST, le=10_000_000)
    """Host memory of a node."""
    host_cores: int | None = Field(default=None, gt=0, le=100_000)
    """Host cores of a node."""
    nvme_gb_per_s: float | None = Field(default=None, ge=LEAST, le=10_000)
    """Sustained NVMe write rate of a node, GB/s."""
    price_usd_per_gpu_hour: float | None = Field(default=None, ge=0, le=1_000_000)
    """Price, US dollars per GPU-hour; 0: one's own machines."""
