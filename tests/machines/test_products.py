"""Printed names and numbers of MiB -> accelerators of the catalogue: every one of them, and none by mistake."""

from __future__ import annotations

import pytest

from planner.catalog import accelerator_ids, load_accelerator
from planner.errors import InputError
from planner.machines import identify
from planner.units import GIB, MIB

PRINTED = [
    ("Tesla V100-SXM2-16GB", 16160, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", 32510, "v100-sxm2-32gb"),
    ("Tesla V100-SXM3-32GB", 32510, "v100-sxm2-32gb"),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100-sxm-40gb"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm-80gb"),
    ("NVIDIA A100-PCIE-40GB", 40960, "a100-pcie-40gb"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie-80gb"),
    ("NVIDIA A800-SXM4-80GB", 81920, "a800-sxm-80gb"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm-80gb"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie-80gb"),
    ("NVIDIA H100 NVL", 95830, "h100-nvl-94gb"),
    ("NVIDIA H800", 81559, "h800-sxm-80gb"),
    ("NVIDIA H20", 97871, "h20-96gb"),
    ("NVIDIA H200", 143771, "h200-sxm-141gb"),
    ("NVIDIA GH200 480GB", 97871, "gh200-96gb"),
    ("NVIDIA B200", 183359, "b200-sxm-180gb"),
    ("NVIDIA B300 SXM6 AC", 275040, "b300-sxm-288gb"),
    ("NVIDIA GB200", 189471, "gb200-nvl72"),
    ("NVIDIA GB300", 284208, "gb300-nvl72"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("NVIDIA A40", 46068, "a40"),
    ("NVIDIA RTX A6000", 49140, "rtx-a6000"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-blackwell"),
    ("AMD Instinct MI300X OAM", 196592, "mi300x"),
    ("AMD Instinct MI250X", 65520, "mi250x"),
    ("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", 65520, "mi250x"),
    ("Aldebaran/MI200 [Instinct MI250X/MI250]", 65520, "mi250x"),
    ("74b5", 196288, "mi300x"),
]


@pytest.mark.parametrize(("name", "mib", "identifier"), PRINTED, ids=lambda value: str(value))
def test_what_drivers_print(name: str, mib: int, identifier: str) -> None:
    """The variant is found, and its memory is the catalogue's."""
    match = identify(name, mib)
    assert match.accelerator.id == identifier
    assert match.memory_gib is None


@pytest.mark.parametrize(("name", "mib", "identifier"), PRINTED, ids=lambda value: str(value))
def test_labels_have_dashes_for_spaces(name: str, mib: int, identifier: str) -> None:
    """Kubernetes labels write the same name with dashes or underscores."""
    for mark in "-_":
        assert identify(name.replace(" ", mark), mib).accelerator.id == identifier


@pytest.mark.parametrize("identifier", accelerator_ids())
def test_every_accelerator_is_found_by_its_own_name(identifier: str) -> None:
    """Id, with and without the number of MiB that it can allocate."""
    mib = round(load_accelerator(identifier).memory.allocatable_bytes / MIB)
    found = identify(identifier)
    assert found.accelerator.id == identifier
    assert "variant-assumed" not in {finding.id for finding in found.findings}
    assert identify(identifier.upper(), mib).accelerator.id == identifier


def test_the_number_wins_over_the_name() -> None:
    """A name that says 80GB on a card with 96 GB."""
    assert identify("NVIDIA H100 80GB HBM3", 97871).accelerator.id == "h100-sxm-96gb"
    assert identify("NVIDIA A100-SXM4-80GB", 40960).accelerator.id == "a100-sxm-40gb"


@pytest.mark.parametrize(
    ("name", "mib", "identifier"),
    [("NVIDIA GeForce RTX 4090", 49140, "rtx-4090"), ("NVIDIA A100-SXM-64GB", 65536, "a100-sxm-80gb")],
)
def test_rebuilt_cards_keep_their_memory(name: str, mib: int, identifier: str) -> None:
    """A size that no variant has: the number is used, less what allocators do not reach, and told."""
    match = identify(name, mib)
    assert match.accelerator.id == identifier
    assert match.memory_gib == pytest.approx(mib * MIB / GIB, rel=0.02)
    assert match.memory_gib is not None
    assert match.memory_gib * GIB < mib * MIB
    assert "memory-unusual" in {finding.id for finding in match.findings}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090"),
        ("NVIDIA L40", "l40s"),
        ("NVIDIA A10", "a10g"),
        ("NVIDIA H200 NVL", "h200-sxm-141gb"),
        ("NVIDIA H800 PCIe", "h800-sxm-80gb"),
        ("Tesla V100-PCIE-32GB", "v100-sxm2-32gb"),
        ("NVIDIA H20-3e", "h20-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-blackwell"),
        ("AMD Instinct MI300A", "mi300x"),
        ("Quadro P400", ""),
        ("", ""),
    ],
)
def test_other_cards_are_not_mistaken(name: str, near: str) -> None:
    """Cards that are not in the catalogue are refused with the nearest ids, however alike the name."""
    with pytest.raises(InputError, match="not in the catalogue") as problem:
        identify(name, 32768)
    assert near in (problem.value.allowed or "")


def test_more_memory_is_not_more_speed() -> None:
    """H20: told that it computes at a fraction of the smaller H100."""
    (found,) = identify("NVIDIA H20", 97871).findings
    assert "148 instead of 989 TFLOP/s" in found.message
    assert "h100-sxm-80gb" in found.message


def test_a_bare_name_is_an_assumption() -> None:
    """A scheduler's ``h100`` is the usual variant, and that is said."""
    match = identify("h100")
    assert match.accelerator.id == "h100-sxm-80gb"
    assert {finding.id for finding in match.findings} == {"variant-assumed"}
    assert identify("NVIDIA-A100-PCIE-40GB").findings == ()
