"""The map of ranks: groups numbered as the rank grids have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from planner.render import rank_grids
from planner.report.figures import pictures
from planner.report.places import STAGE, place_map
from planner.service import ClusterInput, JobInput, PlanRequest, StrategyInput, estimate, suggest
from planner.specs.plan import PlanDocument
from tests.report.documents import CASES, alone, experts, interleaved, piped


def on_titan() -> PlanDocument:
    """A grid with axes of torchtitan's own for experts and for replicas."""
    cluster = ClusterInput(gpu="h100", gpus=32)
    request = PlanRequest(
        model="deepseek-moe-16b",
        cluster=cluster,
        job=JobInput(seq_len=4096, global_batch=128),
        backend="torchtitan",
        pins=("ep=8", "shard_degree=16"),
    )
    return suggest(request)


def long_sequences(**strategy: Any) -> PlanDocument:
    """Sequences over four ranks, and two copies of the model."""
    given = StrategyInput(**{"tp": 4, "pp": 4, "cp": 4, **strategy})
    cluster = ClusterInput(gpu="h100", gpus=128)
    return estimate("llama-3.1-70b", cluster, JobInput(seq_len=8192, global_batch=32), given)


@pytest.mark.parametrize("document", [piped, experts, on_titan, long_sequences], ids=lambda case: case.__name__)
def test_groups_are_those_of_the_grids(document: Callable[[], PlanDocument]) -> None:
    """Two drawn ranks have the same number exactly if the framework's grid puts them into one group."""
    plan_document = document()
    topology = pictures(plan_document).topology
    grids = rank_grids(plan_document, plan_document.best)
    kinds = {kind.name: kind for grid in reversed(grids) for kind in grid.groups()}
    drawn: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for node in place_map(topology).nodes:
        for cell in node.cells:
            for key, group in cell.groups:
                drawn[key][group].add(cell.rank)
    shown = {rank.rank for rank in topology.ranks}
    for axis in topology.axes:
        expected = {frozenset(kinds[axis.name].ranks(rank)) & shown for rank in shown}
        found = drawn[axis.name.replace(" ", "-")]
        assert {frozenset(group) for group in found.values()} == expected, axis.name


def test_stages_are_numbered_by_position() -> None:
    """The first choice of a pipeline shows stages."""
    drawn = pictures(piped()).topology
    shown = place_map(drawn)
    assert [choice.key for choice in shown.choices if choice.chosen] == [STAGE]
    cells = [cell for node in shown.nodes for cell in node.cells]
    assert [cell.shown for cell in cells] == [place.coordinates["pp"] for place in drawn.ranks]


def test_left_out_nodes_are_named() -> None:
    """Of very many nodes, the gap says which are missing."""
    topology = pictures(interleaved()).topology
    gaps = [node.before for node in place_map(topology).nodes if node.before]
    assert gaps == [f"nodes {len(topology.shown_nodes) - 1} to 2,046"]


def test_one_gpu_has_no_choice() -> None:
    """Without groups there is nothing to colour by."""
    assert place_map(pictures(alone()).topology).choices == ()


@pytest.mark.parametrize("name", CASES)
def test_every_shown_rank_has_a_cell(name: str) -> None:
    """In rank order."""
    topology = pictures(CASES[name]()).topology
    ranks = [cell.rank for node in place_map(topology).nodes for cell in node.cells]
    assert ranks == [place.rank for place in topology.ranks]


def test_groups_are_numbered_in_the_order_of_their_ranks() -> None:
    """The first ranks are in group 0 of every kind, and every group begins behind the one before it; a colour is of one
    drawn group alone as long as there are colours."""
    for document in (piped(), experts(), on_titan(), long_sequences()):
        shown = place_map(pictures(document).topology)
        cells = [cell for node in shown.nodes for cell in node.cells]
        for index, choice in enumerate(shown.choices):
            first = list(dict.fromkeys(cell.groups[index][1] for cell in cells))
            assert first == list(range(len(first))), choice.label


def test_drawn_groups_have_colours_of_their_own() -> None:
    """Group 0 and group 12 of sixteen nodes look alike only where more than a dozen groups are drawn."""
    cluster = ClusterInput(gpu="h100", gpus=1024)
    job = JobInput(seq_len=4096, global_batch=1024)
    document = estimate("deepseek-v3", cluster, job, StrategyInput(pp=16, ep=32))
    topology = pictures(document).topology
    cells = [cell for node in place_map(topology).nodes for cell in node.cells]
    assert sorted({cell.shown for cell in cells}) == [0, 1, 15]
    assert len({cell.style for cell in cells}) == 3
    assert [cell.groups for cell in cells][-1][0] == ("stage", 15)
    numbers = {dict(cell.groups)["ep"] for cell in cells}
    assert numbers == {0, 1, 2, 3, 31}


def test_copies_are_those_of_data_and_context_ranks() -> None:
    """Ranks of a sequence hold the same weights: gradients and states are over both, as the cost model prices them."""
    document = long_sequences()
    topology = pictures(document).topology
    axes = {axis.name: axis for axis in topology.axes}
    assert document.best.strategy.shard_degree == 8
    assert (axes["dp x cp"].size, axes["dp x cp"].stride) == (8, 4)
    assert axes["dp x cp"].shares == "gradients and optimizer states"
    assert "gradients" not in axes["dp"].shares + axes["cp"].shares
    assert {row.axis for row in topology.traffic} == {"tp", "cp", "pp", "dp x cp"}
    key = next(choice.key for choice in place_map(topology).choices if choice.label == "DP x CP group")
    groups = [dict(cell.groups)[key] for node in place_map(topology).nodes for cell in node.cells]
    assert groups[:32] == [0, 1, 2, 3] * 8
    assert groups[32:64] == [4, 5, 6, 7] * 8


def test_copies_without_data_ranks() -> None:
    """One sequence at a time over the whole cluster: there is a group that the gradients travel in."""
    topology = pictures(long_sequences(cp=8)).topology
    assert {axis.name: axis.size for axis in topology.axes} == {"tp": 4, "cp": 8, "dp x cp": 8, "pp": 4}
    assert {row.axis for row in topology.traffic} >= {"dp x cp"}
