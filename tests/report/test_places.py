"""The map of ranks: groups numbered as the rank grids have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

from planner.render import rank_grids
from planner.report.figures import pictures
from planner.report.places import STAGE, grid_of, place_map
from planner.service import ClusterInput, JobInput, PlanRequest, suggest
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


@pytest.mark.parametrize("document", [piped, experts, on_titan], ids=lambda case: case.__name__)
def test_groups_are_those_of_the_grids(document: Callable[[], PlanDocument]) -> None:
    """Two drawn ranks have the same number exactly if the framework's grid puts them into one group."""
    plan_document = document()
    topology = pictures(plan_document).topology
    grids = {axis.name: grid for grid in reversed(rank_grids(plan_document, plan_document.best)) for axis in grid.axes}
    drawn: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for node in place_map(topology).nodes:
        for cell in node.cells:
            for key, group in cell.groups:
                drawn[key][group].add(cell.rank)
    shown = {rank.rank for rank in topology.ranks}
    for axis in topology.axes:
        grid = grids[axis.name]
        expected = set()
        for rank in shown:
            step = grid.stride(axis.name)
            first = rank - rank // step % axis.size * step
            expected.add(frozenset(first + k * step for k in range(axis.size)) & shown)
        assert {frozenset(group) for group in drawn[axis.name].values()} == expected, axis.name


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


def test_replicas_belong_to_the_experts_grid_where_it_has_no_axis_for_them() -> None:
    """torchtitan's experts are replicated along the axis of everything else."""
    sizes = {"dp_shard": 16, "dp_replicate": 2, "ep": 8, "efsdp": 2}
    assert grid_of("ep", sizes) == ["ep", "efsdp", "dp_replicate"]
    assert grid_of("ep", {"dp_shard": 16, "dp_replicate": 2, "ep": 8, "edp": 4}) == ["ep", "edp"]
    assert grid_of("dp_shard", sizes) == ["dp_shard", "dp_replicate"]
