"""``nvidia-smi topo -m``: links, islands, rails and cards from every way in which people paste the matrix."""

from __future__ import annotations

import itertools
import re

import pytest

from planner.errors import InputError
from planner.machines import compute_nics, read_machines, size_of
from planner.machines.links import full_groups, islands, nvlinks
from tests.machines import ids, message, read, text


def links(name: str) -> tuple[tuple[str, ...], ...]:
    found = read(name).links
    assert found is not None
    return found.matrix


RAILS = {0: "NIC0", 1: "NIC1", 2: "NIC3", 3: "NIC4", 4: "NIC5", 5: "NIC6", 6: "NIC8", 7: "NIC9"}


@pytest.mark.parametrize("name", ["topo_8xh100_10nic.txt", "topo_8xh100_10nic_spaces.txt"])
def test_rails_of_eight_gpus_with_ten_cards(name: str) -> None:
    """Each GPU has the card under its own switch; the two that are near no GPU do not count, with or without tabs."""
    inventory = read(name)
    assert inventory.links is not None
    assert nvlinks(inventory.links.matrix) == (18,)
    assert dict(inventory.links.rails) == RAILS
    assert [nic.label for nic in compute_nics(inventory.nics)] == list(RAILS.values())
    assert "NIC2" in message(inventory, "nic-not-counted")
    assert "NIC7" in message(inventory, "nic-not-counted")
    assert [device.numa for device in inventory.devices] == [0] * 4 + [1] * 4


def test_names_of_cards_come_from_the_legend() -> None:
    """The legend names the cards; storage bonds keep their label in the finding."""
    inventory = read("topo_8xh100_10nic.txt")
    assert [nic.name for nic in inventory.nics][:3] == ["mlx5_0", "mlx5_1", "mlx5_bond_0"]
    assert "NIC2 (mlx5_bond_0)" in message(inventory, "nic-not-counted")


def test_pcie_islands() -> None:
    """Without NVLink, pairs under one host bridge are islands."""
    inventory = read("topo_4x4090_pcie.txt")
    assert inventory.links is not None
    assert nvlinks(inventory.links.matrix) == (0,)
    assert islands(inventory.links.matrix) == ((0, 1), (2, 3))
    assert "tp=2" in message(inventory, "pcie-islands")


def test_cube_mesh_is_not_uniform() -> None:
    """NVLink joins all eight, but only 0-3 and 4-7 have a link between every two."""
    matrix = links("topo_8xv100_cube_mesh.txt")
    assert nvlinks(matrix) == (0, 1, 2)
    assert islands(matrix) == (tuple(range(8)),)
    assert full_groups(matrix) == ((0, 1, 2, 3), (4, 5, 6, 7))
    told = message(read("topo_8xv100_cube_mesh.txt"), "nvlink-partial")
    assert "0-3 and 4-7" in told
    assert "tp=4" in told


def test_cards_named_in_the_header() -> None:
    """Old drivers write card names instead of NIC0; two GPUs under a switch share a card."""
    inventory = read("topo_8xv100_cube_mesh.txt")
    assert [(nic.name, nic.near) for nic in inventory.nics] == [("mlx5_0", (0, 1)), ("mlx5_1", (4, 5))]


@pytest.mark.parametrize(
    ("name", "links_of_pair", "numa"), [("topo_ansi.txt", "NV6", [0, 1]), ("topo_ansi_bare.txt", "NV12", [0, 1])]
)
def test_terminal_escapes(name: str, links_of_pair: str, numa: list[int]) -> None:
    """Colour codes, with or without their escape character, CRLF, and a header without the leading tab."""
    inventory = read(name)
    assert links(name) == (("X", links_of_pair), (links_of_pair, "X"))
    assert [device.numa for device in inventory.devices] == numa
    assert [(nic.label, nic.near) for nic in inventory.nics] == [("NIC0", (0,))]


def test_domain_of_a_rack_is_not_visible() -> None:
    """Four GPUs of a GB200 node: the rack's domain is said to be invisible, and no card is near a GPU."""
    inventory = read("topo_gb200_4gpu.txt")
    assert nvlinks(links("topo_gb200_4gpu.txt")) == (18,)
    assert len(inventory.devices) == 4
    assert "ClusterUUID" in message(inventory, "domain-not-visible")
    assert "nic-near-no-gpu" in ids(inventory)
    assert len(compute_nics(inventory.nics)) == 4


def test_glued_cells() -> None:
    """Cells without anything between them: links by their words, NUMA node split from the last range of CPUs."""
    inventory = read("topo_4xa100_glued.txt")
    assert inventory.links is not None
    assert set(itertools.chain(*inventory.links.matrix)) == {"X", "NV12"}
    assert [device.numa for device in inventory.devices] == [0, 0, 0, 1]
    assert [nic.near for nic in inventory.nics] == [(0, 1), (0, 1), (2,), (2,), (3,)]
    assert dict(inventory.links.rails) == {0: "NIC0", 1: "NIC1", 2: "NIC2", 3: "NIC4"}


def test_every_cell_can_be_glued() -> None:
    """The sample with tabs and the same without any white space between cells give the same links."""
    tabbed = text("topo_8xh100_10nic.txt").split("\nLegend")[0]
    glued = "\n".join(re.sub(r"[\t ]+", "", line) for line in tabbed.splitlines())
    assert read_machines(glued, source="topo").links == read_machines(tabbed, source="topo").links


def test_a_link_glued_to_the_cpus() -> None:
    """``NV10-15`` is NV1 and the CPUs 0-15: a number of links is never followed by a dash."""
    glued = "    GPU0GPU1CPU AffinityNUMA Affinity\nGPU0X   NV10-150\nGPU1NV1 X   16-311\n"
    found = read_machines(glued, source="topo")
    assert found.links is not None
    assert found.links.matrix == (("X", "NV1"), ("NV1", "X"))
    assert [device.numa for device in found.devices] == [0, 1]


def test_one_bridged_pair_and_a_third_card() -> None:
    """A bridge joins two of three cards; the third is alone."""
    assert islands(links("topo_3x3090_bridge.txt")) == ((0, 1), (2,))
    told = message(read("topo_3x3090_bridge.txt"), "nvlink-islands")
    assert "0-1 only; without a link: 2" in told
    assert "tp=2" in told


def test_crossed_pairs_get_an_order() -> None:
    """Bridges that join GPUs which are no neighbours: the order that makes them neighbours is given."""
    assert islands(links("topo_4xh100nvl_crossed.txt")) == ((0, 2), (1, 3))
    told = message(read("topo_4xh100nvl_crossed.txt"), "nvlink-islands")
    assert "0+2 and 1+3" in told
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in told


def test_one_gpu() -> None:
    """A machine with one GPU has no links to tell of."""
    inventory = read("topo_1xl4.txt")
    assert size_of(inventory).gpus_per_node == 1
    assert inventory.findings == ()
    assert inventory.devices[0].numa == 0


def test_two_halves_that_differ_are_told() -> None:
    """A matrix whose halves disagree was mixed up on the way."""
    mixed = text("topo_4x4090_pcie.txt").replace("GPU1\tPHB", "GPU1\tSYS")
    assert "links-not-symmetric" in ids(read_machines(mixed))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda whole: whole.split("GPU3\tSYS")[0], "rows are missing"),
        (lambda whole: whole.replace("GPU2\tSYS", "GPU2\tABC"), "the row of GPU2 has not 4 links"),
        (lambda whole: "nothing here", "no matrix of GPUs is found"),
        (lambda whole: text("topo_p2p.txt"), "which GPUs may talk to each other"),
        (lambda whole: whole.splitlines()[0], "no matrix of GPUs is found"),
    ],
    ids=["cut short", "unknown link", "other text", "peer-to-peer matrix", "header only"],
)
def test_what_is_no_matrix_is_refused(change: object, told: str) -> None:
    """Texts that cannot be read say what is wrong and which command to run."""
    assert callable(change)
    with pytest.raises(InputError, match=told) as problem:
        read_machines(change(text("topo_4x4090_pcie.txt")), source="topo")
    assert "nvidia-smi topo -m" in str(problem.value)
