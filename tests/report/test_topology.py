"""The map of ranks: the framework's own order, nodes that are left out, levels of links, groups that straddle nodes."""

from __future__ import annotations

from typing import Any

import pytest

from planner.report.described import axes_table, topology_words
from planner.report.figures import pictures
from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.pictures import TopologyMap


def places(
    gpus: int, model: str = "llama-3.1-70b", gpu: str = "h100", batch: int = 256, **strategy: Any
) -> TopologyMap:
    job = JobInput(seq_len=4096, global_batch=batch)
    given = StrategyInput(**strategy)
    return pictures(estimate(model, ClusterInput(gpu=gpu, gpus=gpus), job, given)).topology


def test_ranks_that_differ_in_one_axis_share_its_group() -> None:
    """Coordinates name every rank once; tensor ranks are neighbours, pipeline ranks the farthest apart."""
    found = places(64, tp=4, pp=4)
    assert [axis.name for axis in found.axes] == ["tp", "dp", "pp"]
    seen = {tuple(place.coordinates.values()): place.rank for place in found.ranks}
    assert len(seen) == 64
    assert [seen[tp, 0, 0] for tp in range(4)] == [0, 1, 2, 3]
    assert [seen[0, dp, 0] for dp in range(4)] == [0, 4, 8, 12]
    assert [seen[0, 0, pp] for pp in range(4)] == [0, 16, 32, 48]


def test_experts_have_axes_of_their_own() -> None:
    """Expert groups lie over the same ranks, beside the dense ones."""
    found = places(64, "mixtral-8x7b", tp=2, pp=2, ep=8)
    assert [axis.name for axis in found.axes] == ["tp", "dp", "pp", "ep", "edp"]
    assert all(set(place.coordinates) == {axis.name for axis in found.axes} for place in found.ranks)


def test_one_gpu_has_no_groups() -> None:
    found = places(1, "llama-3.2-1b")
    assert (found.axes, found.traffic) == ((), ())
    assert [(place.rank, place.node, place.coordinates) for place in found.ranks] == [(0, 0, {})]


@pytest.mark.parametrize(("gpus", "shown"), [(128, 16), (136, 16), (16384, 16), (16, 2)])
def test_of_very_many_nodes_the_first_and_the_last_are_drawn(gpus: int, shown: int) -> None:
    found = places(gpus, batch=gpus, tp=8)
    assert (found.nodes, len(found.shown_nodes)) == (gpus // 8, shown)
    assert (found.shown_nodes[0], found.shown_nodes[-1]) == (0, found.nodes - 1)
    assert (found.ranks[-1].rank, len(found.ranks)) == (gpus - 1, 8 * shown)


def test_nodes_of_the_group_that_lies_worst() -> None:
    """Groups that do not divide a node straddle its border, though the first one does not."""
    found = places(48, "llama-2-7b", batch=48, tp=2, pp=8)
    assert {axis.name: axis.nodes for axis in found.axes} == {"tp": 1, "dp": 2, "pp": 6}


def test_levels_of_links() -> None:
    """Inside a node, inside an NVL72 rack over its nodes of four, and between racks."""
    rack = {row.axis: row.level for row in places(64, gpu="gb200", tp=8, pp=2).traffic}
    assert rack == {"tp": "domain", "pp": "domain", "dp": "domain"}
    racks = {row.axis: row.level for row in places(128, gpu="gb200", tp=4, pp=2).traffic}
    assert racks == {"tp": "node", "pp": "network", "dp": "domain"}
    assert {row.axis: row.level for row in places(64, tp=8).traffic} == {"tp": "node", "dp": "network"}


def test_racks_that_are_not_filled_are_said_to_be() -> None:
    """A job over several NVL72 racks is counted with 64 GPUs of each; one rack is used whole."""
    job = JobInput(seq_len=4096, global_batch=288)

    def words(gpus: int) -> str:
        document = estimate("llama-3.1-8b", ClusterInput(gpu="gb200", gpus=gpus), job, StrategyInput())
        return topology_words(pictures(document))

    assert "72 GPUs; a job over several such domains is counted with 64 in each" in words(144)
    assert "several" not in words(72) + words(36)


def test_groups_as_a_table() -> None:
    """Size, first ranks and distance of every kind, also of stages that are not drawn."""
    job = JobInput(seq_len=4096, global_batch=256)
    document = estimate("llama-3.1-70b", ClusterInput(gpu="h100", gpus=2048), job, StrategyInput(tp=8, pp=16))
    rows = {row[0]: row[1:5] for row in axes_table(pictures(document)).table.rows}
    assert rows["TP"] == ("8", "0, 1, 2, 3, 4, 5, 6, 7", "1", "1")
    assert rows["DP"] == ("16", "0, 8, 16, ..., 120", "8", "16")
    assert rows["PP"] == ("16", "0, 128, 256, ..., 1920", "128", "16")
