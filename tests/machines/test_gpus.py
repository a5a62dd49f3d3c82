"""Lists of GPUs from ``nvidia-smi`` and ``rocm-smi``, and network cards from ``ibstat``."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.machines import combine, compute_nics, read_machines, size_of
from tests.machines import ids, message, read, text


def test_a_machine_of_everything() -> None:
    """Busy, narrow, split and different GPUs are each told; memory is the number that is printed."""
    inventory = read("smi_mixed.csv")
    assert "GPU 1 is in use: 70112 MiB" in message(inventory, "gpu-in-use")
    assert "GPU 2 uses PCIe x8 of x16" in message(inventory, "pcie-narrow")
    assert "GPU 5" in message(inventory, "mig-enabled")
    assert "the smallest has 22528 MiB" in message(inventory, "gpus-mixed")
    assert [device.memory_mib for device in inventory.devices] == [
        *(81559, 81559, 81559, 95830, 97871, 40960, 22528, 189471)
    ]
    assert size_of(inventory).gpus_per_node == 7


def test_values_without_units() -> None:
    """``nounits`` leaves the unit in the header."""
    assert [device.memory_mib for device in read("smi_nounits.csv").devices] == [81920, 81920]
    gib = "name, memory.total [GiB]\nNVIDIA H200, 140\n"
    assert read_machines(gib).devices[0].memory_mib == 143360


def test_two_hosts_in_one_text() -> None:
    """A parallel shell's prefix tells the machines apart; so does an index that starts again."""
    assert size_of(read("smi_two_hosts.csv")).nodes == 2
    rows = "0, NVIDIA H200, 143771 MiB\n1, NVIDIA H200, 143771 MiB\n"
    again = read_machines("index, name, memory.total [MiB]\n" + 3 * rows)
    assert (size_of(again).nodes, size_of(again).gpus_per_node) == (3, 2)


def test_list_of_names() -> None:
    """``nvidia-smi -L`` names GPUs and shows instances."""
    inventory = read("smi_list.txt")
    assert [(device.name, device.mig) for device in inventory.devices] == [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-SXM4-80GB", False),
    ]
    assert "memory of GPU 0-1" in inventory.unread


def test_memory_that_is_not_said() -> None:
    """[N/A] stays unknown and is listed as unread."""
    inventory = read("smi_unified.csv")
    assert inventory.devices[0].memory_mib is None
    assert inventory.unread == ("memory of GPU 0",)


@pytest.mark.parametrize("noise", ["[Unknown Error]", "[Not Supported]", "[GPU requires reset]", "N/A", "", "-1 MiB"])
def test_other_words_for_unknown(noise: str) -> None:
    """Whatever stands in place of a number is not taken for one."""
    inventory = read_machines(f"index, name, memory.total [MiB]\n0, NVIDIA H200, {noise}\n")
    assert inventory.devices[0].memory_mib is None


def test_without_header() -> None:
    """``noheader`` loses which column is which: names show themselves, and a number counts where such a GPU has so much
    memory."""
    units = read_machines("0, NVIDIA H100 80GB HBM3, 81559 MiB, 3 MiB\n1, NVIDIA H100 80GB HBM3, 81559 MiB, 3 MiB\n")
    assert [(device.index, device.memory_mib) for device in units.devices] == [(0, 81559), (1, 81559)]
    assert "no header says" in message(units, "columns-assumed")
    bare = read_machines("Tesla V100-SXM2-32GB, 7, 32510\n" * 4)
    assert [(device.index, device.memory_mib) for device in bare.devices] == [(i, 32510) for i in range(4)]
    used = read_machines("NVIDIA H200, 512 MiB\n")
    assert used.devices[0].memory_mib is None
    assert used.unread == ("memory of GPU 0",)
    with pytest.raises(InputError, match="no list of GPUs") as problem:
        read_machines("a, b, c\n", source="smi")
    assert "--query-gpu=index,name,memory.total" in str(problem.value)


def test_xgmi() -> None:
    """Four matrices; the one of link types counts, and the GPU is not named."""
    inventory = read("rocm_4xmi300x.txt")
    assert inventory.links is not None
    assert {link for row in inventory.links.matrix for link in row} == {"X", "XGMI"}
    assert "hops-differ" not in ids(inventory)
    assert inventory.unread == ("name of the GPUs",)
    assert [device.numa for device in inventory.devices] == [0, 0, 1, 1]


def test_rocm_with_names_and_memory() -> None:
    """Product and memory of the same text are read; one GPU is in use."""
    inventory = read("rocm_8xmi300x_named.txt")
    assert {(device.name, device.memory_mib) for device in inventory.devices} == {("AMD Instinct MI300X OAM", 196592)}
    assert "GPU 3" in message(inventory, "gpu-in-use")
    assert inventory.unread == ()


def test_rocm_with_device_ids_only() -> None:
    """Where the series is not known, the model is a PCI id; a name wins over it in any order."""
    whole = text("rocm_8xmi300x_named.txt")
    unnamed = whole.replace("AMD Instinct MI300X OAM", "N/A")
    assert read_machines(unnamed).devices[0].name == "0x74a1"
    later = unnamed.replace("Card Vendor: \t\tAdvanced", "Product Name: \t\tMI300X OAM of Advanced")
    assert read_machines(later).devices[0].name == "MI300X OAM of Advanced Micro Devices, Inc. [AMD/ATI]"


def test_xgmi_bridges() -> None:
    """Pairs with a bridge are islands, two hops apart."""
    inventory = read("rocm_4xmi210_bridges.txt")
    assert "0-1 and 2-3" in message(inventory, "xgmi-islands")
    assert "1 to 2 hops" in message(inventory, "hops-differ")


@pytest.mark.parametrize(
    "broken",
    [
        "=== ROCm System Management Interface ===\n=== End of ROCm SMI Log ===\n",
        "=== Link Type between two GPUs ===\n  GPU0 GPU1\nGPU0 0\nGPU1 XGMI 0\n",
    ],
    ids=["no matrix", "short row"],
)
def test_rocm_without_links_is_refused(broken: str) -> None:
    """A log without the matrix names the command with which it is complete."""
    with pytest.raises(InputError, match="rocm-smi --showtopo --showproductname"):
        read_machines(broken)


def test_ports_that_carry_a_job() -> None:
    """Down ports and slower ones do not count; a list that ends in an error is said to be cut."""
    inventory = read("ibstat_mixed.txt")
    assert [(nic.name, nic.gbps) for nic in compute_nics(inventory.nics)] == [("mlx5_0", 400), ("mlx5_2", 400)]
    assert [nic.name for nic in inventory.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    assert "mlx5_10" in message(inventory, "nic-down")
    assert "mlx5_1 (200 Gbit/s, Ethernet)" in message(inventory, "nic-slower")
    assert "mlx5_8" in message(inventory, "list-cut-short")


def test_two_ports_of_one_card() -> None:
    """Each port is a card of its own to a job; Ethernet is told."""
    inventory = read("ibstat_roce_dual_port.txt")
    assert [nic.name for nic in compute_nics(inventory.nics)] == ["bnxt_re0:1", "bnxt_re0:2"]
    assert "nic-ethernet" in ids(inventory)


def test_a_quoted_list_of_ports() -> None:
    """Mail puts > before lines and takes their indents away."""
    quoted = "\n".join(f">> {line.strip()}" for line in text("ibstat_8xh100.txt").splitlines())
    assert read_machines(quoted).nics == read("ibstat_8xh100.txt").nics


def test_ibstat_without_cards_is_refused() -> None:
    """A panic before the first card leaves nothing to read."""
    with pytest.raises(InputError, match="no port is listed"):
        read_machines("ibpanic: [1] main: can't list IB device names\n", source="ibstat")


def test_topology_and_rates_are_joined_by_name() -> None:
    """Cards near a GPU get the rate that ibstat prints for the same name."""
    joined = combine([read("topo_8xh100_10nic.txt"), read("ibstat_8xh100.txt"), read("smi_8xh100.csv")])
    used = compute_nics(joined.nics)
    assert len(used) == 8
    assert {(nic.gbps, nic.layer) for nic in used} == {(400.0, "InfiniBand")}
    assert joined.devices[7].name == "NVIDIA H100 80GB HBM3"
    assert joined.devices[7].numa == 1


def test_counts_that_disagree_are_told() -> None:
    """A topology of eight and a list of four are not the same machine."""
    four = "\n".join(text("smi_8xh100.csv").splitlines()[:5])
    assert "gpu-count-differs" in ids(combine([read("topo_8xh100_10nic.txt"), read_machines(four)]))
