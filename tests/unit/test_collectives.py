"""Collective times against published nccl-tests sweeps, and the rules of placement.

A sweep has a machine to itself; training collectives share it, so the model's plateau is deliberately 0.87 of the
listed in-domain one.  Tolerances are what was found, per fabric and message size; where the model is further off the
case is an expected failure that names the reason.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.collectives import Group, group
from planner.specs.cluster import Cluster
from planner.units import MIB
from tests.strategies import machines, question

GIGA = 1e9


def placed(cluster: Cluster, size: int, stride: int = 1) -> Group:
    return group(question(cluster=cluster), np.array([size]), np.array([stride]))


def all_reduce_bus(cluster: Cluster, size: int, message: float, stride: int = 1) -> float:
    """Bus bandwidth in GB/s as nccl-tests print it."""
    seconds = placed(cluster, size, stride).all_reduce_s(np.array([message]))
    return float(2 * (size - 1) / size * message / seconds[0] / GIGA)


def all_gather_bus(cluster: Cluster, size: int, message: float) -> float:
    seconds = placed(cluster, size).all_gather_s(np.array([message]))
    return float((size - 1) / size * message / seconds[0] / GIGA)


@pytest.mark.parametrize(
    ("accelerator", "mib", "published", "tolerance"),
    [
        # NVIDIA dgxc-benchmarking, DGX H100, nccl-tests with in-switch reduction.
        pytest.param("h100", 1, 67.0, 0.35, id="h100-1MiB-nvls"),
        pytest.param("h100", 16, 237.2, 0.35, id="h100-16MiB-nvls"),
        pytest.param("h100", 1024, 466.3, 0.20, id="h100-1GiB-nvls"),
        # Plateaus with in-switch reduction: GTC 2024 S62129, GTC 2025 S72583.
        pytest.param("h100", 16384, 480.0, 0.20, id="h100-plateau"),
        pytest.param("h200", 16384, 482.0, 0.20, id="h200-plateau"),
        pytest.param("b200", 16384, 840.0, 0.20, id="b200-plateau"),
        # Stas Bekman, Machine Learning Engineering Open Book, 8 x A100.
        pytest.param("a100", 1, 18.0, 0.90, id="a100-1MiB"),
        pytest.param("a100", 16, 106.2, 0.30, id="a100-16MiB"),
        pytest.param("a100", 64, 171.5, 0.25, id="a100-64MiB"),
        pytest.param("a100", 1024, 229.0, 0.20, id="a100-1GiB"),
    ],
)
def test_all_reduce_in_a_node(accelerator: str, mib: float, published: float, tolerance: float) -> None:
    """Eight GPUs on NVSwitch, ring and in-switch reduction."""
    modelled = all_reduce_bus(machines(accelerator, 8), 8, mib * MIB)
    assert modelled == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(("mib", "published"), [(1, 67.0), (16, 237.2)])
def test_in_switch_reduction_within_35_percent(mib: float, published: float) -> None:
    """What tensor parallelism without sequence parallelism would see on an idle H100 node."""
    assert all_reduce_bus(machines("h100", 8), 8, mib * MIB) == pytest.approx(published, rel=0.35)


def test_all_gather_plateau() -> None:
    """H100 all-gather and reduce-scatter: 361 GB/s measured, 0.87 of it in training."""
    assert all_gather_bus(machines("h100", 8), 8, 16384 * MIB) == pytest.approx(361, rel=0.15)


NODES = [4, 8, 16, 32, 64, 128, 256, 512]
SWEEP = {
    # arXiv 2411.13055 (read off the plot, 5 %): all-reduce GB/s on 4 to 512 nodes of eight H100.
    4: [46, 33, 27, 22, 18, 17, 15, 13],
    16: [114, 87, 72, 58, 45, 45, 42, 40],
    64: [217, 188, 162, 150, 137, 123, 117, 112],
    256: [273, 280, 265, 253, 246, 236, 225, 220],
    1024: [337, 328, 322, 315, 304, 304, 301, 286],
    16384: [355, 359, 357, 353, 348, 348, 340, 345],
}
TRUSTED = {64: 512, 256: 512, 1024: 512, 16384: 512}
"""Message in MiB -> most nodes up to which the model is within 20 %."""


@pytest.mark.parametrize("mib", TRUSTED)
def test_all_reduce_across_nodes(mib: int) -> None:
    """Gradient-sized messages over whole nodes are within 20 % up to the stated node count."""
    for nodes, published in zip(NODES, SWEEP[mib], strict=True):
        if nodes <= TRUSTED[mib]:
            modelled = all_reduce_bus(machines("h100", 8 * nodes), 8 * nodes, mib * MIB)
            assert modelled == pytest.approx(published, rel=0.20), nodes


@pytest.mark.parametrize(
    ("mib", "nodes", "published", "tolerance"), [(4, 8, 33.0, 0.5), (16, 32, 58.0, 0.5), (16, 512, 40.0, 0.7)]
)
def test_small_messages_on_many_nodes(mib: float, nodes: int, published: float, tolerance: float) -> None:
    """Trees keep small all-reduces fast on many nodes; the model is optimistic there, by less than the stated share."""
    modelled = all_reduce_bus(machines("h100", 8 * nodes), 8 * nodes, mib * MIB)
    assert modelled == pytest.approx(published, rel=tolerance)


def test_uneven_groups_straddle_nodes() -> None:
    """Groups of six ranks on nodes of eight: every second one leaves the node, so all are priced by the network."""
    cluster = machines("h100", 48)
    assert placed(cluster, 6).crosses[0] == 1.0
    assert placed(cluster, 6).bus_bytes_per_s[0] < placed(cluster, 8).bus_bytes_per_s[0] / 3


def test_one_nic_a_rank_when_the_group_has_one_rank_a_node() -> None:
    """With eight tensor-parallel ranks in the node every data-parallel group owns one adapter: 45 to 48 GB/s."""
    cluster = machines("h100", 512)
    assert 44 * GIGA <= float(placed(cluster, 64, 8).bus_bytes_per_s[0]) <= 48 * GIGA
    assert all_reduce_bus(cluster, 512, 16384 * MIB) > 6 * all_reduce_bus(cluster, 64, 16384 * MIB, stride=8)


def test_placement() -> None:
    """A group stays in the node while its ranks fit there; an NVL72 rack holds far wider ones."""
    assert placed(machines("h100", 64), 8).crosses[0] == 0.0
    assert placed(machines("h100", 64), 4, 4).crosses[0] == 1.0
    assert placed(machines("gb200", 64), 64).crosses[0] == 0.0


def test_partial_mesh_uses_fewer_links() -> None:
    """MI300X: two GPUs share one link of seven (47.7 GB/s measured), eight reach 313."""
    cluster = machines("mi300x", 8)
    assert all_reduce_bus(cluster, 2, 8192 * MIB) == pytest.approx(47.7, rel=0.25)
    assert all_reduce_bus(cluster, 8, 8192 * MIB) == pytest.approx(313, rel=0.25)


def test_alone_costs_nothing() -> None:
    """A group of one moves nothing."""
    alone = placed(machines("h100", 8), 1)
    size = np.array([1e9])
    for seconds in (alone.all_reduce_s(size), alone.all_gather_s(size), alone.all_to_all_s(size), alone.send_s(size)):
        assert seconds[0] == 0.0


def test_oversubscription_divides_what_leaves_the_node() -> None:
    """Twice oversubscribed: half the bandwidth outside, the same inside."""
    plain, shared = machines("h100", 64), machines("h100", 64, oversubscription=2.0)
    assert placed(shared, 8, 8).bus_bytes_per_s[0] == pytest.approx(placed(plain, 8, 8).bus_bytes_per_s[0] / 2)
    assert placed(shared, 8).bus_bytes_per_s[0] == placed(plain, 8).bus_bytes_per_s[0]
