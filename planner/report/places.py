"""The map of ranks on nodes as cells with text: which group of each kind a GPU belongs to, and which stage.

Colours repeat after a dozen drawn groups; the number of the group stands in the cell."""

from __future__ import annotations

from dataclasses import dataclass

from planner.report.described import MOST_COLOURS, axis_name
from planner.specs.pictures import RankPlace, TopologyMap

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
    names = [axis.name for axis in topology.axes]
    keys = [STAGE, *names] if "pp" in names else names
    choices = tuple(Choice(_key(name), _label(name), index == 0) for index, name in enumerate(keys))
    drawn = sorted({_group(place, keys[0]) for place in topology.ranks}) if keys else [0]
    nodes = []
    previous = -1
    for node in topology.shown_nodes:
        cells = tuple(_cell(place, keys, drawn) for place in topology.ranks if place.node == node)
        nodes.append(NodeBox(_title(topology, node), _left_out(previous, node), cells))
        previous = node
    return PlaceMap(choices, tuple(nodes))


def _key(name: str) -> str:
    """``dp-x-cp``: a name that can be part of an attribute's."""
    return name.replace(" ", "-")


def _label(name: str) -> str:
    return {STAGE: "pipeline stage", "pp": "pipeline"}.get(name, f"{axis_name(name)} group")


def _group(place: RankPlace, name: str) -> int:
    return place.coordinates["pp"] if name == STAGE else place.groups[name]


def _cell(place: RankPlace, names: list[str], drawn: list[int]) -> Cell:
    """``drawn`` has the groups that are shown first: each takes the next colour, whatever its number."""
    groups = tuple((_key(name), _group(place, name)) for name in names)
    where = ", ".join(f"{axis_name(axis)} {position}" for axis, position in place.coordinates.items())
    shown = groups[0][1] if groups else 0
    return Cell(place.rank, where, groups, shown, f"c{drawn.index(shown) % MOST_COLOURS + 1}")


def _title(topology: TopologyMap, node: int) -> str:
    if topology.domain_gpus <= topology.gpus_per_node:
        return f"node {node}"
    return f"node {node}, domain {node * topology.gpus_per_node // topology.domain_gpus}"


def _left_out(previous: int, node: int) -> str:
    if node - previous <= 1:
        return ""
    return f"node {previous + 1}" if node - previous == 2 else f"nodes {previous + 1:,} to {node - 1:,}"
