"""Time of collectives by group placement and message size.

A group of contiguous-stride ranks either stays in a fast-link domain or leaves it; outside, its bus bandwidth is the
sum of the NICs that its own members contribute on a node.  Bandwidth rises with the message as B / (1 + (half /
S)^0.7), fitted to nccl-tests sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.cost.context import CostContext
from planner.specs.batch import BoolArray, FloatArray, IntArray

_MESSAGE_EXPONENT = 0.7
"""Fits 8 x A100 (0.88), 8 x H100 (0.65), 8 x H200 (0.83) and multi-node sweeps (0.83-0.96) within about 15 %."""

_SWEPT_RING_RANKS = 16
"""Ranks of the ring over two nodes for which ``network_half_message_bytes`` stands, hence of its pieces."""
_SWITCH_REDUCE_RANKS = 5
"""Smallest group that NCCL reduces in the NVLink switch (8 GiB on H200: 363 GB/s at 4 GPUs, 414 to 473 at 5 to 8)."""


@dataclass(frozen=True)
class Group:
    """N process groups; all arrays of length N."""

    size: FloatArray
    stride: IntArray
    """Distance between neighbours in rank order."""
    bus_bytes_per_s: FloatArray
    """Large-message bus bandwidth per rank of rings (all-gather, reduce-scatter)."""
    reduce_bus_bytes_per_s: FloatArray
    """The same of all-reduce, which a switch can do for the ranks."""
    half_message_bytes: FloatArray
    half_piece_bytes: float
    """What an all-to-all over the network sends to one peer at half of its rate: as large as a piece of the ring."""
    latency_s: FloatArray
    """Least time of a ring."""
    reduce_latency_s: FloatArray
    """Least time of an all-reduce, which has trees."""
    point_latency_s: FloatArray
    """Least time between two of its ranks."""
    crosses: FloatArray
    """1 where the group leaves the fast-link domain, else 0."""
    point_bytes_per_s: FloatArray
    """One rank to one other rank."""
    domains: FloatArray
    """Fast-link domains over which the group is spread."""
    inside_exchange_bytes_per_s: FloatArray
    """All-to-all within a domain, per rank."""
    outside_bytes_per_s: float
    """What one rank can send out of its domain."""

    def _slow(self, message: FloatArray) -> FloatArray:
        """How much slower than at large messages."""
        return 1.0 + (self.half_message_bytes / np.maximum(message, 1.0)) ** _MESSAGE_EXPONENT

    @property
    def fraction(self) -> FloatArray:
        """(n - 1) / n."""
        return (self.size - 1.0) / self.size

    def all_gather_bytes(self, full_bytes: FloatArray) -> FloatArray:
        """What one rank sends in an all-gather (or reduce-scatter) whose gathered tensor has ``full_bytes``."""
        return self.fraction * full_bytes

    def all_gather_s(self, full_bytes: FloatArray) -> FloatArray:
        """All-gather (or reduce-scatter) whose gathered tensor has ``full_bytes``."""
        time = self.all_gather_bytes(full_bytes) * self._slow(full_bytes) / self.bus_bytes_per_s
        return np.where(self.size > 1, np.maximum(self.latency_s, time), 0.0)

    def all_reduce_bytes(self, size_bytes: FloatArray) -> FloatArray:
        """What one rank sends in an all-reduce: a reduce-scatter and an all-gather."""
        return 2.0 * self.fraction * size_bytes

    def all_reduce_s(self, size_bytes: FloatArray) -> FloatArray:
        time = self.all_reduce_bytes(size_bytes) * self._slow(size_bytes) / self.reduce_bus_bytes_per_s
        return np.where(self.size > 1, np.maximum(self.reduce_latency_s, time), 0.0)

    def _all_to_all_parts(self, sent_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Bytes that stay in the domain and bytes that leave it."""
        outside = (self.domains - 1.0) / self.domains * sent_bytes
        return np.maximum(self.fraction * sent_bytes - outside, 0.0), outside

    def all_to_all_bytes(self, sent_bytes: FloatArray) -> FloatArray:
        """What one rank sends to others of ``sent_bytes`` for the whole group."""
        inside, outside = self._all_to_all_parts(sent_bytes)
        return inside + outside

    def all_to_all_s(self, sent_bytes: FloatArray) -> FloatArray:
        """Exchange of ``sent_bytes`` per rank, evenly spread over the group; what leaves the domain goes through the
        NICs."""
        inside, outside = self._all_to_all_parts(sent_bytes)
        return self._exchange(inside, outside, inside + outside)

    def _dispatch_parts(self, token_bytes: FloatArray, copies: int) -> tuple[FloatArray, FloatArray]:
        """Bytes over the fast links, those that came from other domains included, and bytes that leave the domain."""
        outside = (self.domains - 1.0) / self.domains * _met(self.domains, copies) * token_bytes
        return self.fraction * _met(self.size, copies) * token_bytes, outside

    def dispatch_bytes(self, token_bytes: FloatArray, copies: int) -> FloatArray:
        """What one rank sends in ``dispatch_s``, passed on tokens included."""
        inside, outside = self._dispatch_parts(token_bytes, copies)
        return inside + outside

    def dispatch_s(self, token_bytes: FloatArray, copies: int) -> FloatArray:
        """Sending every token to experts spread evenly: one copy to each domain over the network, and one to each rank
        over the fast links, however many of its ``copies`` experts live there (DeepEP, HybridEP).

        Of n places a token meets n (1 - (1 - 1/n)^copies) on average; what crosses domains is passed on inside while
        other tokens travel.  One kernel streams the tokens of all peers (DeepEP: 43-47 of 50 GB/s between nodes), so a
        small message costs its latency only."""
        inside, outside = self._dispatch_parts(token_bytes, copies)
        streamed = self.latency_s + np.maximum(
            inside / self.inside_exchange_bytes_per_s, outside / self.outside_bytes_per_s
        )
        return np.where(self.size > 1, streamed, 0.0)

    def _exchange(self, inside: FloatArray, outside: FloatArray, message: FloatArray) -> FloatArray:
        """Both ways at once, each slowed by small messages; the longer decides."""
        half = np.where(self.crosses > 0, self.half_piece_bytes * self.size, self.half_message_bytes)
        slow = 1.0 + (half / np.maximum(message, 1.0)) ** _MESSAGE_EXPONENT
        time = slow * np.maximum(inside / self.inside_exchange_bytes_per_s, outside / self.outside_bytes_per_s)
        return np.where(self.size > 1, np.maximum(self.latency_s, time), 0.0)

    def send_bytes(self, size_bytes: FloatArray) -> FloatArray:
        """What one rank sends to the next one."""
        return np.where(self.size > 1, size_bytes, 0.0)

    def send_s(self, size_bytes: FloatArray) -> FloatArray:
        """Point-to-point transfer to the next rank of the group."""
        return np.where(self.size > 1, self.point_latency_s + size_bytes / self.point_bytes_per_s, 0.0)

    def leaves(self, block: int) -> BoolArray:
        """Whether groups have ranks in several blocks of so many contiguous ranks (nodes, domains)."""
        return np.asarray(_members(self.size.astype(np.int64), self.stride, block) < self.size)


class Measure(Protocol):
    """What is asked of an exchange; whoever knows which exchanges of which sizes there are passes it on."""

    def all_gather(self, group: Group, full_bytes: FloatArray) -> FloatArray: ...
    def all_reduce(self, group: Group, size_bytes: FloatArray) -> FloatArray: ...
    def all_to_all(self, group: Group, sent_bytes: FloatArray) -> FloatArray: ...
    def dispatch(self, group: Group, token_bytes: FloatArray, copies: int) -> FloatArray: ...
    def send(self, group: Group, size_bytes: FloatArray) -> FloatArray: ...


class Seconds:
    """How long an exchange takes."""

    all_gather = staticmethod(Group.all_gather_s)
    all_reduce = staticmethod(Group.all_reduce_s)
    all_to_all = staticmethod(Group.all_to_all_s)
    dispatch = staticmethod(Group.dispatch_s)
    send = staticmethod(Group.send_s)


class SentBytes:
    """What one rank sends."""

    all_gather = staticmethod(Group.all_gather_bytes)
    all_reduce = staticmethod(Group.all_reduce_bytes)
    all_to_all = staticmethod(Group.all_to_all_bytes)
    dispatch = staticmethod(Group.dispatch_bytes)
    send = staticmethod(Group.send_bytes)


SECONDS, SENT_BYTES = Seconds(), SentBytes()


def _members(size: IntArray, stride: IntArray, block: int) -> IntArray:
    """Fewest ranks of a group within one block of contiguous ranks.

    A group fills a block of size * stride ranks.  Groups that do not divide the block straddle its border, and the
    worst of them has only gcd(size * stride, block) ranks on one side."""
    return np.asarray(np.clip(np.gcd(size * stride, block) // stride, 1, size))


def _met(places: FloatArray, copies: int) -> FloatArray:
    """How many of ``places`` a token reaches whose ``copies`` experts are spread evenly over them."""
    return np.asarray(places * (1.0 - (1.0 - 1.0 / places) ** copies))


def group(context: CostContext, size: IntArray, stride: IntArray) -> Group:
    """Groups of ``size`` ranks that lie ``stride`` ranks apart."""
    cluster, constants = context.cluster, context.constants
    domain = cluster.ranks_per_domain
    members = _members(size, stride, domain).astype(float)
    crosses = size > members
    fabric = cluster.accelerator.fabric
    inside, reduce_inside = _fabric_bus(context, members)
    if fabric.topology == "pcie":
        # Neighbours talk through their own switch; interleaved groups all meet at the bridges between switches.
        shared = np.where(members > 1, stride, 1)
        inside, reduce_inside = inside / shared, reduce_inside / shared
    nic = _nic_bytes_per_s(context)
    nodes = np.maximum(size / members, 1.0)
    doublings = np.log2(nodes)
    ring = constants.network_latency_s + constants.network_hop_s * (nodes - 1.0)
    if cluster.ring_step_s is not None:
        ring = cluster.ring_step_s * (size - 1.0)
    tree = constants.network_latency_s * (1.0 + doublings)
    half_outside = np.minimum(
        constants.network_half_message_bytes * (1.0 + doublings), constants.network_half_message_cap_bytes
    )
    if cluster.network_spans:
        # The sweep holds for messages as large as gradient buckets; below that the latency of the ring decides.
        half_outside = np.zeros(len(size))
    floor = constants.fabric_latency_s + constants.fabric_hop_s * np.maximum(members - 2.0, 0.0)
    outside = np.minimum(inside / constants.fabric_bus_share, _across_nodes(context, nodes) * members)
    pair = fabric.pair_bytes_per_s or fabric.bytes_per_s
    return Group(
        size=size.astype(float),
        stride=stride,
        bus_bytes_per_s=np.where(crosses, outside, inside),
        reduce_bus_bytes_per_s=np.where(crosses, outside, reduce_inside),
        half_message_bytes=np.where(crosses, half_outside, constants.fabric_half_message_bytes),
        half_piece_bytes=constants.network_half_message_bytes / _SWEPT_RING_RANKS,
        latency_s=np.where(crosses, ring, floor),
        reduce_latency_s=np.where(crosses, tree, floor),
        point_latency_s=np.where(crosses, ring, constants.fabric_latency_s),
        crosses=crosses.astype(float),
        point_bytes_per_s=np.where(crosses, np.minimum(nic, pair), pair * constants.fabric_bus_share),
        domains=nodes,
        inside_exchange_bytes_per_s=_exchange_inside(context, members),
        outside_bytes_per_s=nic,
    )


def _across_nodes(context: CostContext, nodes: FloatArray) -> FloatArray:
    """Large-message bandwidth per member of groups over that many nodes: where the network was swept the measured one
    (all-reduce; gathers inside training steps reach as much), else that of the NICs."""
    cluster = context.cluster
    if not cluster.network_spans:
        return np.full(len(nodes), _nic_bytes_per_s(context))
    swept = np.log2([span.nodes for span in cluster.network_spans])
    bus = np.log([span.bus_bytes_per_s for span in cluster.network_spans])
    whole_node = np.exp(np.interp(np.log2(nodes), swept, bus))
    return np.asarray(whole_node / cluster.gpus_per_node / cluster.oversubscription)


def _fabric_bus(context: CostContext, members: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(ring, all-reduce) bus bandwidth inside the domain.

    On a mesh a group of n uses n - 1 of the links; NVLink switches reduce for groups of five or more.
    """
    fabric, share = context.cluster.accelerator.fabric, context.constants.fabric_bus_share
    listed = fabric.all_gather_bus_bytes_per_s or fabric.all_reduce_bus_bytes_per_s or 0.8 * fabric.bytes_per_s
    ring = np.full(len(members), listed * share)
    if fabric.topology == "mesh" and fabric.domain_gpus > 1:
        ring = ring * np.minimum(1.0, (members - 1.0).clip(1.0) / (fabric.domain_gpus - 1))
    if fabric.switch_reduce_bus_bytes_per_s is None:
        return ring, ring
    return ring, np.where(members >= _SWITCH_REDUCE_RANKS, fabric.switch_reduce_bus_bytes_per_s * share, ring)


def _exchange_inside(context: CostContext, members: FloatArray) -> FloatArray:
    """All-to-all rate of one rank inside the domain.

    Through PCIe bridges the listed rate is that of a whole domain; smaller groups of neighbours send less across them.
    """
    fabric, share = context.cluster.accelerator.fabric, context.constants.fabric_bus_share
    listed = fabric.all_to_all_bytes_per_s or 0.85 * fabric.bytes_per_s
    rate = np.full(len(members), listed)
    if fabric.topology == "pcie" and fabric.all_reduce_bus_bytes_per_s is not None:
        near = listed * (fabric.domain_gpus - 1) / (members - 1.0).clip(1.0)
        rate = np.clip(near, listed, max(listed, fabric.all_reduce_bus_bytes_per_s))
    return np.asarray(rate * share)


def _nic_bytes_per_s(context: CostContext) -> float:
    """Network bandwidth that one GPU contributes to its group."""
    cluster, constants = context.cluster, context.constants
    line = cluster.nics_per_node * cluster.nic_bytes_per_s / cluster.gpus_per_node
    achieved = line * constants.network_share
    if cluster.network_bus_bytes_per_s is not None:
        achieved = min(line, cluster.network_bus_bytes_per_s / cluster.gpus_per_node)
    return achieved / cluster.oversubscription
