"""What ``nvidia-smi`` prints for people, broken GPUs in any form, and queries that repeat themselves."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.machines import combine, compute_nics, read_machines, size_of
from planner.machines.products import identify
from tests.machines import ids, message, read, text


def test_table() -> None:
    """Memory, a busy GPU, a split one and one that shows errors instead of values."""
    inventory = read("smi_table.txt")
    assert inventory.source == "nvidia-smi"
    assert {(device.name, device.memory_mib) for device in inventory.devices} == {("NVIDIA A100-SXM4-80GB", 81920)}
    assert [device.whole for device in inventory.devices] == [True, True, False, False]
    assert "GPU 1 is in use: 30211 MiB" in message(inventory, "gpu-in-use")
    assert "GPU 2" in message(inventory, "mig-enabled")
    assert "GPU 3 does not answer" in message(inventory, "gpu-failed")
    assert size_of(inventory).gpus_per_node == 2


def test_two_tables() -> None:
    """They are taken for two machines, which is told."""
    inventory = read_machines(text("smi_table.txt") * 2)
    assert inventory.machines == 2
    assert "--nodes 1" in message(inventory, "machines-assumed")


@pytest.mark.parametrize(
    ("cut", "mib", "identifier"),
    [
        ("NVIDIA A100-SXM...", 81920, "a100-sxm-80gb"),
        ("NVIDIA A100-SXM...", 40960, "a100-sxm-40gb"),
        ("NVIDIA A100-PCI...", 40960, "a100-pcie-40gb"),
        ("NVIDIA H100 PCI...", 81559, "h100-pcie-80gb"),
        ("NVIDIA H100 80G...", 81559, "h100-sxm-80gb"),
        ("Tesla V100-SXM2...", 16160, "v100-sxm2-16gb"),
    ],
)
def test_names_that_the_table_cuts(cut: str, mib: int, identifier: str) -> None:
    """As far as the name goes, and as an assumption."""
    match = identify(cut, mib)
    assert match.accelerator.id == identifier
    assert "variant-assumed" in {finding.id for finding in match.findings}


@pytest.mark.parametrize("cut", ["NVIDIA GeForce ...", "GeForce RTX 309...", "Tesla V100-PCI..."])
def test_names_cut_too_short_are_refused(cut: str) -> None:
    """An RTX 309... may be a 3090 or a 3090 Ti; what prints the whole name is told."""
    with pytest.raises(InputError, match="not in the catalogue") as problem:
        identify(cut, 24576)
    assert "nvidia-smi -L" in str(problem.value)


def test_log() -> None:
    """Values are found by the section they stand in: BAR1 has a total, too."""
    inventory = read("smi_log.txt")
    assert inventory.source == "nvidia-smi -q"
    assert {(device.name, device.memory_mib) for device in inventory.devices} == {("NVIDIA H100 80GB HBM3", 81559)}
    assert [device.whole for device in inventory.devices] == [True, False, True, False]
    assert "GPU 2 uses PCIe x8 of x16" in message(inventory, "pcie-narrow")
    assert "GPU 2 is not ready (state In Progress" in message(inventory, "fabric-not-ready")
    assert "GPU 3" in message(inventory, "gpu-failed")


def test_log_of_two_machines() -> None:
    """A banner starts another one."""
    assert read_machines(text("smi_log.txt") * 2).machines == 2


def test_log_without_names_is_refused() -> None:
    """``-q -d MEMORY`` leaves them out."""
    with pytest.raises(InputError, match="names no GPU"):
        read_machines("==============NVSMI LOG==============\nGPU 00000000:19:00.0\n    FB Memory Usage\n")


def test_links_that_are_down() -> None:
    """``nvlink --status`` counts them for each GPU."""
    inventory = read("smi_nvlink_down.txt")
    assert [device.nvlinks for device in inventory.devices] == [18, 18, 15, 18]
    assert "GPU 2 has NVLinks that are down: 15 of 18" in message(inventory, "nvlink-down")
    split = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nNvlink queries are not supported for Devices in MIG mode\n"
    assert read_machines(split).devices[0].mig


def test_lost_gpus_are_not_counted() -> None:
    """Neither one that the list names as broken nor one that it leaves out."""
    inventory = read("smi_lost.csv")
    told = [finding.message for finding in inventory.findings if finding.id == "gpu-failed"]
    assert any("0000:5F:00.0" in sentence for sentence in told)
    assert any("GPU 1 does not answer" in sentence for sentence in told)
    assert size_of(inventory).gpus_per_node == 2
    assert "gpus-mixed" not in ids(inventory)


def test_a_query_that_repeats_itself() -> None:
    """Times say that it is one machine; without them several are taken, which is told; a uuid is certain."""
    inventory = read("smi_repeated.csv")
    assert (inventory.machines, len(inventory.devices)) == (None, 2)
    assert "samples-repeated" in ids(inventory)
    rows = "0, NVIDIA H200, 143771 MiB\n1, NVIDIA H200, 143771 MiB\n"
    header = "index, name, memory.total [MiB]\n"
    assert "machines-assumed" in ids(read_machines(header + 2 * rows))
    assert "machines-assumed" not in ids(read_machines(2 * (header + rows)))
    own = "index, uuid, name, memory.total [MiB]\n" + 2 * "0, GPU-1, NVIDIA H200, 143771 MiB\n"
    assert read_machines(own).machines is None
    hosts = "".join(f"{host}: {line}\n" for line in (header + 2 * rows).splitlines() for host in ("a", "b"))
    assert (read_machines(hosts).machines, len(read_machines(hosts).devices)) == (2, 2)


def test_names_only() -> None:
    """One column is a query as well; in a longer text the word alone is none."""
    inventory = read_machines("name\nNVIDIA L40S\nNVIDIA L40S\n")
    assert [device.name for device in inventory.devices] == ["NVIDIA L40S"] * 2
    assert "columns-assumed" not in ids(inventory)
    log = "name\nserial\nuuid\n" + text("smi_table.txt")
    assert len(read_machines(log).devices) == 4
    noisy = "index, name\n0, NVIDIA L40S\nwarning, something else\n1, NVIDIA L40S\n"
    assert [device.index for device in read_machines(noisy).devices] == [0, 1]


def test_amd_smi() -> None:
    """Rows are named by place on the bus; the matrix is the same."""
    inventory = read("amd_4xmi210_pairs.txt")
    assert inventory.source == "amd-smi topology"
    assert inventory.links is not None
    assert inventory.links.matrix[0] == ("X", "XGMI", "PCIE", "PCIE")
    assert "0-1 and 2-3" in message(inventory, "xgmi-islands")
    assert "hops-differ" in ids(inventory)


def test_several_outputs_in_one_text() -> None:
    """A job's log holds one after the other: names complete the matrix; what cannot be read is told."""
    log = text("smi_table.txt") + "\n" + text("topo_4xa100_mesh.txt") + "\nSLURM_JOB_ID=7\n"
    inventory = read_machines(log)
    assert inventory.links is not None
    assert {device.name for device in inventory.devices} == {"NVIDIA A100-SXM4-80GB"}
    assert any("neither nodes nor GPUs" in part for part in inventory.unread)
    report = "GPU 0,1,2,3: NVIDIA A100-SXM4-80GB\nGPU 0,1,2,3 Compute Capability: 8.0\nNVIDIA Topology:\n"
    inventory = read_machines(report + text("topo_4xa100_mesh.txt"))
    assert [device.name for device in inventory.devices] == ["NVIDIA A100-SXM4-80GB"] * 4
    assert len(read_machines("GPU models and configuration: GPU 0: NVIDIA L4\n").devices) == 1
    torn = text("smi_table.txt") + "\n" + "\n".join(text("topo_4xa100_mesh.txt").splitlines()[:3])
    assert any("rows are missing" in part for part in read_machines(torn).unread)


def _ports(*ports: tuple[str, str, int]) -> str:
    line = "CA '{}'\n\tPort 1:\n\t\tState: {}\n\t\tRate: {}\n\t\tLink layer: InfiniBand\n"
    return "".join(line.format(*port) for port in ports)


@pytest.mark.parametrize(
    ("down", "slow", "names", "rates"),
    [
        (0, 0, ["NIC0", "NIC1", "NIC2", "NIC3"], {400.0}),
        (1, 0, ["mlx5_1", "mlx5_2", "mlx5_3"], {400.0}),
        (0, 2, ["mlx5_2", "mlx5_3"], {400.0}),
        (4, 0, [], set()),
    ],
)
def test_a_matrix_without_its_legend(down: int, slow: int, names: list[str], rates: set[float]) -> None:
    """Its cards have other names than the list: the list's rate counts, and its number where it is smaller."""
    ports = [(f"mlx5_{i}", "Down" if i < down else "Active", 100 if i < slow else 400) for i in range(4)]
    inventory = combine([read("topo_8xh800.txt"), read_machines(_ports(*ports))])
    counted = compute_nics(inventory.nics)
    assert [nic.name for nic in counted] == names
    assert {nic.gbps for nic in counted} == rates
    assert "legend" in message(inventory, "nic-names-differ")
