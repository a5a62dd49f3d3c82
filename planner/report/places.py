"""The map of ranks on nodes as cells with text: which group of each axis a GPU belongs to, and which stage.

Colours repeat after a dozen; the number of the group stands in the cell."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from planner.report.described import MOST_COLOURS, axis_name
from planner.specs.pictures import RankPlace, TopologyMap

EXPERT = ("etp", "ep", "edp", "efsdp")
"""Axes that only the grid of the experts has; the same ranks form the grid of everything else."""
STAGE = "stage"


@dataclass(frozen=True)
class Choice:
    """One way to colour the map."""

    key: str
    label: str
    chosen: bool


@dataclass(frozen=True)
class Cell:
    """One GPU: its rank, where it is on every axis, and its group number for every choice."""

    rank: int
    where: str
    groups: tuple[tuple[str, int], ...]
    shown: int
    """Group number of the choice that is shown first."""
    style: str


@dataclass(frozen=True)
class NodeBox:
    """The GPUs of one node; ``before`` says which nodes are left out in front of it."""

    title: str
    before: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class PlaceMap:
    """The nodes that are shown and the ways to colour them."""

    choices: tuple[Choice, ...]
    nodes: tuple[NodeBox, ...]


def place_map(topology: TopologyMap) -> PlaceMap:
    """Cells of every shown node in rank order."""
    sizes = {axis.name: axis.size for axis in topology.axes}
    keys = [STAGE] if sizes.get("pp", 1) > 1 else []
    keys += [name for name, size in sizes.items() if size > 1]
    first = keys[0] if keys else ""
    choices = tuple(Choice(key, _label(key), key == first) for key in keys)
    nodes = []
    previous = -1
    for node in topology.shown_nodes:
        cells = tuple(_cell(place, keys, sizes) for place in topology.ranks if place.node == node)
        nodes.append(NodeBox(_title(topology, node), _left_out(previous, node), cells))
        previous = node
    return PlaceMap(choices, tuple(nodes))


def _label(key: str) -> str:
    return {STAGE: "pipeline stage", "pp": "pipeline"}.get(key, f"{axis_name(key)} group")


def _cell(place: RankPlace, keys: list[str], sizes: dict[str, int]) -> Cell:
    groups = tuple((key, group_number(place, key, sizes)) for key in keys)
    where = ", ".join(f"{axis_name(axis)} {position}" for axis, position in place.coordinates.items())
    shown = groups[0][1] if groups else 0
    return Cell(place.rank, where, groups, shown, f"c{shown % MOST_COLOURS + 1}")


def group_number(place: RankPlace, key: str, sizes: dict[str, int]) -> int:
    """Number of the group of ``key`` that holds the rank: its position on the other axes of the same grid, counted."""
    if key == STAGE:
        return place.coordinates["pp"]
    number, stride = 0, 1
    for axis in grid_of(key, sizes):
        if axis != key:
            number += place.coordinates[axis] * stride
            stride *= sizes[axis]
    return number


def grid_of(key: str, sizes: dict[str, int]) -> list[str]:
    """The axes that place a rank together with ``key``; those of the experts share the pipeline with the others, and
    their replicas where no axis of their own holds them."""
    dense = [axis for axis in sizes if axis not in EXPERT]
    if key in dense:
        return dense
    expert = [axis for axis in sizes if axis in EXPERT or axis == "pp"]
    if prod(sizes[axis] for axis in expert) < prod(sizes[axis] for axis in dense):
        expert += [axis for axis in dense if axis == "dp_replicate"]
    return expert


def _title(topology: TopologyMap, node: int) -> str:
    if topology.domain_gpus <= topology.gpus_per_node:
        return f"node {node}"
    return f"node {node}, domain {node * topology.gpus_per_node // topology.domain_gpus}"


def _left_out(previous: int, node: int) -> str:
    if node - previous <= 1:
        return ""
    return f"node {previous + 1}" if node - previous == 2 else f"nodes {previous + 1:,} to {node - 1:,}"
