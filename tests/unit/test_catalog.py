"""The catalogue: every file loads, names are unique and lead somewhere, and figures stay within physical bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from planner.catalog import (
    accelerator_ids,
    default_system,
    load_accelerator,
    load_model,
    load_system,
    loader,
    model_assumption,
    model_ids,
    resolve_accelerator,
    resolve_model,
    resolve_system,
    system_ids,
)
from planner.cost.params import active_conventions, total_params
from planner.errors import InputError
from planner.units import GIB

INDEX: dict[str, Any] = loader.read_yaml(loader.DATA / "aliases.yaml")


@pytest.mark.parametrize("identifier", model_ids())
def test_model_totals_agree_with_the_release(identifier: str) -> None:
    """The dimensions give the published count: exactly if it is exact, else to 1 % or half the last printed digit."""
    entry = load_model(identifier)
    assert entry.id == identifier == entry.spec.name
    published, total = entry.published, total_params(entry.spec) + entry.spec.other_params
    if published.kind == "exact":
        assert total == published.total
    assert abs(total - published.total) <= max(0.01 * published.total, published.unit / 2)


@pytest.mark.parametrize("identifier", [name for name in model_ids() if load_model(name).published.active])
def test_active_parameters_agree_with_the_release(identifier: str) -> None:
    """In one of the three conventions the active count is within 5 % or half a billion of the printed one."""
    entry = load_model(identifier)
    printed = entry.published.active or 0
    counts = active_conventions(entry.spec)
    nearest = min(
        abs(count - printed) for count in (counts.everything, counts.no_input_embedding, counts.no_embeddings)
    )
    assert nearest <= max(0.05 * printed, 5e8)


def test_catalogue_is_complete() -> None:
    """Entries may be added, never lost."""
    assert len(model_ids()) >= 155
    assert len(accelerator_ids()) >= 41
    assert len(system_ids()) >= 18 + 33


@pytest.mark.parametrize("identifier", accelerator_ids())
def test_accelerator_within_physical_bounds(identifier: str) -> None:
    """Dense peaks, memory and links obey the relations that hold for every part; measured never exceeds nominal."""
    device = load_accelerator(identifier)
    assert device.id == identifier
    assert 0.9 < device.memory.allocatable_bytes / device.memory.advertised_bytes <= 1.075
    # A processor core stands in for a GPU where there is none.
    least = 1e10 if device.synchronous else 2.9e11
    assert least <= device.memory.bytes_per_s <= 8e12
    assert device.peak.bf16 is None or device.peak.bf16 <= 2.6e15
    assert device.peak.bf16 or device.peak.fp16 or (device.synchronous and device.peak.fp32)
    for measured, peak in ((device.achieved.bf16, device.peak.bf16), (device.achieved.fp8, device.peak.fp8)):
        assert measured is None or (peak is not None and 0.4 * peak < measured < peak)
    fabric = device.fabric
    assert fabric.pair_bytes_per_s is None or fabric.pair_bytes_per_s <= fabric.bytes_per_s
    assert fabric.all_reduce_bus_bytes_per_s is None or fabric.all_reduce_bus_bytes_per_s <= fabric.bytes_per_s
    assert fabric.all_to_all_bytes_per_s is None or fabric.all_to_all_bytes_per_s <= fabric.bytes_per_s
    assert 1e9 <= device.network_bytes_per_s <= 1e11
    host = device.host_link
    assert host.measured_bytes_per_s is None or host.measured_bytes_per_s <= host.bytes_per_s
    price = [usd for usd in (device.price.low_usd, device.price.mid_usd, device.price.high_usd) if usd is not None]
    assert price == sorted(price)


@pytest.mark.parametrize(
    ("name", "bf16", "allocatable_gib"),
    [
        ("a100-sxm-80gb", 312e12, 79.15),
        ("h100-sxm-80gb", 989.4e12, 79.11),
        ("h100-pcie-80gb", 756e12, 79.11),
        ("h20-96gb", 148e12, 95.0),
        ("b200-sxm-180gb", 2250e12, 178.35),
        ("rtx-4090", 165.2e12, 23.64),
        ("mi250x", 191.5e12, 63.98),
        ("mi300x", 1307.4e12, 191.69),
    ],
)
def test_known_dense_peaks_and_memory(name: str, bf16: float, allocatable_gib: float) -> None:
    """Datasheet figures without sparsity, and the totals that PyTorch prints."""
    device = load_accelerator(name)
    assert device.peak.bf16 == pytest.approx(bf16)
    assert device.memory.allocatable_bytes / GIB == pytest.approx(allocatable_gib, abs=0.01)


@pytest.mark.parametrize("identifier", system_ids())
def test_system_refers_to_a_device_and_fits_its_fabric(identifier: str) -> None:
    """Node types name a known accelerator, share its domain, and their network is no faster than its fabric allows."""
    system = load_system(identifier)
    assert system.id == identifier
    device = load_accelerator(system.accelerator)
    assert system.domain_gpus == device.fabric.domain_gpus
    assert 2**37 <= system.host_memory_bytes_per_node <= 2**43 or device.synchronous
    node = system.nics_per_node * system.nic_bytes_per_s
    assert system.network_bus_bytes_per_s is None or system.network_bus_bytes_per_s <= 1.05 * node


def test_every_accelerator_has_a_default_system() -> None:
    """Whatever is named alone gets a node type of its own kind."""
    assert set(INDEX["default_systems"]) == set(accelerator_ids())
    for identifier in accelerator_ids():
        assert default_system(identifier).accelerator == identifier
    assert default_system("h100").id == "dgx-h100"
    assert default_system("gb200").gpus_per_node == 4
    assert default_system("gb200").domain_gpus == 72


def test_aliases_are_unique_and_resolve() -> None:
    """No alias means two things or hides an id, in any spelling; model files and index agree."""
    from_files = {alias: name for name in model_ids() for alias in load_model(name).aliases}
    assert from_files == INDEX["models"]
    for kind, ids, resolve in (
        ("models", model_ids(), resolve_model),
        ("accelerators", accelerator_ids(), resolve_accelerator),
        ("systems", system_ids(), resolve_system),
    ):
        names = {**{name: name for name in ids}, **INDEX[kind]}
        for name, target in names.items():
            assert resolve(name) == resolve(name.upper()) == resolve(f" org/{name} ") == target
        assert not set(INDEX[kind]) & set(ids)


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("70b", "llama-3.1-70b"),
        ("llama3-70b", "llama-3-70b"),
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("Qwen 2.5 7B", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("qwen2-57b-a14b", "qwen2-57b-a14b"),
    ],
)
def test_spellings_of_models(name: str, identifier: str) -> None:
    """Hub names, capitals, spaces and missing hyphens lead to the same entry."""
    assert load_model(name).id == identifier


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_device_names_as_drivers_print_them(name: str, identifier: str) -> None:
    """What nvidia-smi prints can be pasted."""
    assert load_accelerator(name).id == identifier


@pytest.mark.parametrize("short", sorted(INDEX["ambiguous"]))
def test_ambiguous_names_list_their_candidates(short: str) -> None:
    """A name that several models share is an error listing them, and each candidate works."""
    with pytest.raises(InputError, match="several") as caught:
        load_model(short)
    for candidate in INDEX["ambiguous"][short]:
        assert candidate in str(caught.value)
        assert load_model(candidate).id == candidate


@pytest.mark.parametrize(
    ("load", "name", "near"),
    [
        (load_model, "lama-3.1-70b", "llama-3.1-70b"),
        (load_accelerator, "h10", "h100"),
        (load_system, "dgx-h10", "dgx-h100"),
    ],
)
def test_unknown_names_come_with_near_ones(load: Any, name: str, near: str) -> None:
    """A slip is answered with the name that was meant."""
    with pytest.raises(InputError) as caught:
        load(name)
    assert near in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["", "  ", "x" * 10_000, "../models/llama-3-8b", "a\0b", "llama-3-8b.yaml"], ids=repr)
def test_hostile_names_are_input_errors(name: str) -> None:
    """Empty, endless and path-like names never reach the file system."""
    for load in (load_accelerator, load_system):
        with pytest.raises(InputError):
            load(name)
    if "llama-3-8b" not in name or name.endswith(".yaml"):
        with pytest.raises(InputError):
            load_model(name)


def test_a_bare_size_is_said() -> None:
    """A size taken as a model is announced with its alternatives; a full name is not."""
    sentence = model_assumption("70B") or ""
    assert "llama-3.1-70b" in sentence
    assert "llama-2-70b" in sentence
    assert model_assumption("llama-3.1-70b") is None
    sizes = {alias for alias in INDEX["models"] if re.fullmatch(r"\d+(\.\d+)?[bmt]", alias)}
    assert sizes == set(INDEX["sizes"])


def test_one_question_opens_only_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving a model, a device and its system parses the index and three entries, not the whole catalogue."""
    opened: list[str] = []
    read = loader.read_yaml

    def counting(path: Path) -> Any:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(loader, "read_yaml", counting)
    for cached in (loader._index, loader._names, loader._load_model, loader._load_accelerator, loader._load_system):
        cached.cache_clear()
    load_model("70b")
    default_system("h100")
    load_accelerator("h100")
    assert sorted(opened) == ["aliases.yaml", "dgx-h100.yaml", "h100-sxm-80gb.yaml", "llama-3.1-70b.yaml"]
