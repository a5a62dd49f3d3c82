"""Time of collectives by group placement and message size.

A group of contiguous-stride ranks either stays in a fast-link domain or leaves it; outside, its bus bandwidth is the
sum of the NICs that its own members contribute on a node.  Bandwidth rises with the message as B / (1 + (half /
S)^0.7), fitted to nccl-tests sweeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.context import CostContext
from planner.specs.batch import FloatArray, IntArray

_MESSAGE_EXPONENT = 0.7
"""Fits 8 x A100 (0.88), 8 x H100 (0.65), 8 x H200 (0.83) and multi-node sweeps (0.83-0.96) within about 15 %."""


@dataclass(frozen=True)
class Group:
    """N process groups; all arrays of length N."""

    size: FloatArray
    bus_bytes_per_s: FloatArray
    """Large-message bus bandwidth per rank."""
    half_message_bytes: FloatArray
    latency_s: FloatArray
    crosses: FloatArray
    """1 where the group leaves the fast-link domain, else 0."""
    point_bytes_per_s: FloatArray
    """One rank to one other rank."""
    exchange_bytes_per_s: FloatArray
    """All-to-all, per rank, of what leaves the rank."""

    def _time(self, volume: FloatArray, message: FloatArray) -> FloatArray:
        active = self.size > 1
        safe = np.maximum(message, 1.0)
        slow = 1.0 + (self.half_message_bytes / safe) ** _MESSAGE_EXPONENT
        return np.where(active, np.maximum(self.latency_s, volume * slow / self.bus_bytes_per_s), 0.0)

    @property
    def fraction(self) -> FloatArray:
        """(n - 1) / n."""
        return (self.size - 1.0) / self.size

    def all_gather_s(self, full_bytes: FloatArray) -> FloatArray:
        """All-gather (or reduce-scatter) whose gathered tensor has ``full_bytes``."""
        return self._time(self.fraction * full_bytes, full_bytes)

    def all_reduce_s(self, size_bytes: FloatArray) -> FloatArray:
        return self._time(2.0 * self.fraction * size_bytes, size_bytes)

    def all_to_all_s(self, sent_bytes: FloatArray) -> FloatArray:
        """Exchange of ``sent_bytes`` per rank, evenly spread over the group."""
        slow = 1.0 + (self.half_message_bytes / np.maximum(sent_bytes, 1.0)) ** _MESSAGE_EXPONENT
        time = self.fraction * sent_bytes * slow / self.exchange_bytes_per_s
        return np.where(self.size > 1, np.maximum(self.latency_s, time), 0.0)

    def send_s(self, size_bytes: FloatArray) -> FloatArray:
        """Point-to-point transfer to the next rank of the group."""
        return np.where(self.size > 1, self.latency_s + size_bytes / self.point_bytes_per_s, 0.0)


def domain_ranks(context: CostContext) -> int:
    """Ranks of one fast-link domain as jobs fill it: 64 of the 72 GPUs of a rack when more than one rack is used."""
    cluster = context.cluster
    if cluster.gpus <= cluster.domain_gpus:
        return cluster.gpus
    return 64 if cluster.domain_gpus == 72 else cluster.domain_gpus


def group(context: CostContext, size: IntArray, stride: IntArray) -> Group:
    """Groups of ``size`` ranks that lie ``stride`` ranks apart."""
    cluster, constants = context.cluster, context.constants
    domain = domain_ranks(context)
    members = np.clip(domain // np.maximum(stride, 1), 1, np.maximum(size, 1)).astype(float)
    crosses = size > members
    fabric = cluster.accelerator.fabric
    inside = _fabric_bus(context, members)
    nic = _nic_bytes_per_s(context)
    outside = np.minimum(inside, nic * members)
    nodes = np.maximum(size / members, 1.0)
    latency = np.where(
        crosses,
        constants.network_latency_s + constants.network_hop_s * np.maximum(nodes - 1.0, 0.0),
        constants.fabric_latency_s,
    )
    exchange_inside = (fabric.all_to_all_bytes_per_s or 0.85 * fabric.bytes_per_s) * constants.fabric_bus_share
    # What a rank sends outside its domain is the share of the group that lies there.
    outside_share = np.where(crosses, (size - members) / np.maximum(size - 1.0, 1.0), 0.0)
    exchange = 1.0 / ((1.0 - outside_share) / exchange_inside + outside_share / nic)
    pair = fabric.pair_bytes_per_s or fabric.bytes_per_s
    return Group(
        size=size.astype(float),
        bus_bytes_per_s=np.where(crosses, outside, inside),
        half_message_bytes=np.where(crosses, constants.network_half_message_bytes, constants.fabric_half_message_bytes),
        latency_s=latency,
        crosses=crosses.astype(float),
        point_bytes_per_s=np.where(crosses, np.minimum(nic, pair), pair * constants.fabric_bus_share),
        exchange_bytes_per_s=exchange,
    )


def _fabric_bus(context: CostContext, members: FloatArray) -> FloatArray:
    """Bus bandwidth inside the domain; on a mesh a group of n uses n - 1 of the links."""
    fabric, constants = context.cluster.accelerator.fabric, context.constants
    listed = fabric.all_gather_bus_bytes_per_s or fabric.all_reduce_bus_bytes_per_s or 0.8 * fabric.bytes_per_s
    full = np.full(len(members), listed * constants.fabric_bus_share)
    if fabric.topology == "mesh" and fabric.domain_gpus > 1:
        return full * np.minimum(1.0, (members - 1.0).clip(1.0) / (fabric.domain_gpus - 1))
    return full


def _nic_bytes_per_s(context: CostContext) -> float:
    """Network bandwidth that one GPU contributes to its group."""
    cluster, constants = context.cluster, context.constants
    line = cluster.nics_per_node * cluster.nic_bytes_per_s / cluster.gpus_per_node
    achieved = line * constants.network_share
    if cluster.network_bus_bytes_per_s is not None:
        achieved = min(line, cluster.network_bus_bytes_per_s / cluster.gpus_per_node)
    return achieved / cluster.oversubscription
