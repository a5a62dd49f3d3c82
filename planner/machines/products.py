"""Which accelerator of the catalogue a printed name and a number of MiB mean.

The name decides the family (H100) and form (SXM, PCIe, NVL), the number the size; a size inside a name never counts
when there is a number, because names of rebuilt cards and of Grace machines do not say how much the GPU has."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.catalog import accelerator_ids, load_accelerator, resolve_accelerator
from planner.errors import InputError
from planner.machines.text import note, warning
from planner.specs.cluster import Accelerator
from planner.specs.finding import Finding
from planner.specs.problems import shown
from planner.units import GIB, MIB, TERA

TOLERANCE = 0.03
"""Drivers print 0.4 % (GB200) to 2.1 % (L4) more than what the catalogue lists as allocatable."""
RESERVED = 0.015
"""Share of the printed memory that allocators do not reach on cards of 24 to 48 GB (RTX 4090: 24564 of which 24207)."""
_SLOWER = 2.0
"""Ratio of 16-bit rates from which a larger memory must not be taken for a faster card."""

# fmt: off
_NOISE = frozenset((
    "nvidia", "amd", "instinct", "radeon", "tesla", "geforce", "google", "aws", "intel", "habana", "accelerator",
    "gpu", "graphics", "oam", "vf", "generation", "server", "workstation", "edition", "ac", "slice", "podslice",
    "mega", "hbm2", "hbm2e", "hbm3", "hbm3e", "500w", "nvlink", "aldebaran", "mcm", "lc", "mba", "hpe", "c2",
))
# fmt: on
"""Words of printed names that change neither dimension nor rate.  Words that do, such as Ti, D or Max-Q, are kept, so
that such cards are unknown instead of mistaken."""
_SIZE = re.compile(r"([0-9]{2,3})g(?:b|ib)?")
_FORMS = ("sxm", "pcie", "nvl")
_FORM = re.compile(rf"({'|'.join(_FORMS)})[0-9]{{0,2}}")
_IMPLIED_FORM = {"hbm3": "sxm", "nvlink": "sxm"}
"""NVIDIA prints the memory's kind for H100 SXM cards only (the others are called PCIe and NVL); sites that write
NVLink into a name have PCIe as the other choice, which is told as taken for granted."""
_PCI_IDS = {"74a1": "mi300x", "74b5": "mi300x", "74a5": "mi325x", "75a0": "mi350x", "75a3": "mi355x", "7408": "mi250"}
"""Device ids that AMD's tools and labels give instead of a name (AMD's guide to cluster networking lists them; 74b5 is
the MI300X in a virtual machine, 7408 stands for MI250 and MI250X)."""
_SYNONYMS = {"tpu7x": ("tpu", "v7x"), "trn2": ("trainium2",)} | {
    spelling: (product,) for number, product in _PCI_IDS.items() for spelling in (number, f"0x{number}")
}
_NEARLY = {"mi250": "mi250x", "mi200": "mi250x"}
"""Names of cards that are planned with the figures of another, which is told: an MI250 has 5 % fewer compute units than
an MI250X, and drivers call both MI200."""
_LONGEST = 200


@dataclass(frozen=True)
class Match:
    """An accelerator of the catalogue."""

    accelerator: Accelerator
    memory_gib: float | None
    """What an allocator can reach, where it is not what the catalogue has."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Words:
    """A name taken apart."""

    family: tuple[str, ...]
    form: str | None
    size_gb: int | None
    exact: bool = True
    """Whether the name means this family, and no word of it is cut off."""


def _take_apart(name: str) -> _Words:
    form: str | None = None
    size: int | None = None
    family: list[str] = []
    parts = re.split(r"[\s\-_/()\[\]]+", name.lower())
    synonyms = [part for word in parts for part in _SYNONYMS.get(word, (word,)) if part]
    words = list(dict.fromkeys(_NEARLY.get(word, word) for word in synonyms))
    for word in words:
        form = _IMPLIED_FORM.get(word, form) if form is None else form
        found = _FORM.fullmatch(word)
        sized = _SIZE.fullmatch(word)
        if found is not None and family:
            form = found[1]
        elif sized is not None and family:
            size = int(sized[1])
        elif word not in _NOISE:
            family.append(word)
    if family[:2] == ["tpu", "v5"] and family[2:] in (["lite"], ["litepod"]):
        family = ["tpu", "v5e"]
    certain = "mi250x" in synonyms or not {*_NEARLY, "nvlink"} & set(synonyms)
    return _Words(tuple(family), form, size, certain)


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, _Words]:
    return {identifier: _take_apart(identifier) for identifier in accelerator_ids()}


def identify(name: str, memory_mib: int | None = None) -> Match:
    """The accelerator that a driver, label or scheduler means; InputError with the nearest ids where there is none."""
    words = _whole_words(name[:_LONGEST])
    family = _family(words)
    fitting = [identifier for identifier in family if words.form in (None, _catalogue()[identifier].form)]
    if not fitting and len({_catalogue()[identifier].form for identifier in family} - {None}) == 0:
        # The catalogue knows one form only and does not name it.
        fitting = family
    if not fitting:
        raise _unknown(name, family, memory_mib)
    chosen, single = _choose(fitting, words, memory_mib)
    accelerator = load_accelerator(chosen)
    return Match(
        accelerator,
        usable_gib(accelerator, memory_mib),
        tuple(_about(accelerator, name, memory_mib, single and words.exact)),
    )


def _whole_words(name: str) -> _Words:
    """A name taken apart; of one that a table has cut (``H100 PCI...``) the last word is completed or left out."""
    if not is_cut(name):
        return _take_apart(name)
    whole, _, last = re.sub(r"[\s\-]+(?=[^\s\-]*$)", " ", name.rstrip(" .")).rpartition(" ")
    completed = next((form for form in _FORMS if last and form.startswith(last.lower())), last)
    words = _take_apart(f"{whole} {completed}")
    return replace(words if _family(words) else _take_apart(whole), exact=False)


def is_cut(name: str) -> bool:
    """Whether a table has left out the end of a name."""
    return name.rstrip().endswith("...")


def _family(words: _Words) -> list[str]:
    return [identifier for identifier, own in _catalogue().items() if _same_family(own, words)]


def agrees(name: str, memory_mib: int | None) -> bool:
    """Whether a GPU of this name in the catalogue has so much memory."""
    return memory_mib is not None and any(
        _agrees(load_accelerator(identifier), memory_mib) for identifier in _family(_whole_words(name[:_LONGEST]))
    )


def _same_family(own: _Words, words: _Words) -> bool:
    return own.family == words.family or "".join(own.family) == "".join(words.family)


def _choose(fitting: list[str], words: _Words, memory_mib: int | None) -> tuple[str, bool]:
    """The variant with the nearest memory; by the size in the name, then by what the bare name means, without one.

    False where the text leaves several."""
    if memory_mib is not None:
        differences = {identifier: abs(_allocatable_mib(identifier) - memory_mib) for identifier in fitting}
        fitting = [identifier for identifier in fitting if differences[identifier] == min(differences.values())]
    elif words.size_gb is not None:
        sizes = {identifier: abs((_catalogue()[identifier].size_gb or 0) - words.size_gb) for identifier in fitting}
        fitting = [identifier for identifier in fitting if sizes[identifier] == min(sizes.values())]
    try:
        usual = resolve_accelerator("".join(words.family))
    except InputError:
        return fitting[0], len(fitting) == 1
    return usual if usual in fitting else fitting[0], len(fitting) == 1


def _allocatable_mib(identifier: str) -> float:
    return load_accelerator(identifier).memory.allocatable_bytes / MIB


def _agrees(accelerator: Accelerator, memory_mib: int) -> bool:
    known = accelerator.memory.allocatable_bytes / MIB
    return abs(memory_mib - known) <= TOLERANCE * known


def usable_gib(accelerator: Accelerator, memory_mib: int | None) -> float | None:
    """GiB that allocators reach on a card of this printed size; None where it is what the catalogue has."""
    if memory_mib is None or _agrees(accelerator, memory_mib):
        return None
    return round(memory_mib * MIB * (1 - RESERVED) / GIB, 2)


def _about(accelerator: Accelerator, name: str, memory_mib: int | None, sure: bool) -> list[Finding]:
    findings = []
    if memory_mib is not None and not _agrees(accelerator, memory_mib):
        known = accelerator.memory.allocatable_bytes / MIB
        findings.append(
            warning(
                "memory-unusual",
                f"{name} has {memory_mib} MiB, {accelerator.id} has {known:.0f}: the number is taken, every other "
                "figure is that of the catalogue",
                hint="compare step times with a short run: such cards can have another memory bandwidth",
            )
        )
    if not sure:
        findings.append(
            note(
                "variant-assumed",
                f"{name} is taken as {accelerator.id}",
                hint=f"if it is another variant: --gpu; the GPU's memory decides: {_query(accelerator)}",
            )
        )
    slower = _slower_than(accelerator)
    if slower is not None:
        own, other = dense_flops_per_s(accelerator), dense_flops_per_s(slower)
        findings.append(
            note(
                "more-memory-less-compute",
                f"{accelerator.id} has more memory than {slower.id} but {own / TERA:.0f} instead of {other / TERA:.0f} "
                "TFLOP/s (dense, 16 bit)",
            )
        )
    if accelerator.id == "rtx-4090":
        findings.append(
            note("no-peer-to-peer", "the driver lets RTX 4090 cards exchange data through host memory only (no P2P)")
        )
    return findings


def _query(accelerator: Accelerator) -> str:
    if accelerator.vendor == "amd":
        return "rocm-smi --showproductname --showmeminfo vram"
    return "nvidia-smi --query-gpu=name,memory.total --format=csv"


def dense_flops_per_s(accelerator: Accelerator) -> float:
    """Dense 16-bit FLOP/s; 0 where the catalogue has none."""
    return accelerator.peak.bf16 or accelerator.peak.fp16 or 0.0


def _slower_than(accelerator: Accelerator) -> Accelerator | None:
    """The fastest card of the same architecture with less memory, where it is at least twice as fast."""
    alike = [
        other
        for other in map(load_accelerator, accelerator_ids())
        if other.architecture == accelerator.architecture
        and other.memory.allocatable_bytes < (1 - TOLERANCE) * accelerator.memory.allocatable_bytes
        and dense_flops_per_s(other) >= _SLOWER * dense_flops_per_s(accelerator) > 0
    ]
    return min(alike, key=lambda other: (-dense_flops_per_s(other), other.id), default=None)


def _unknown(name: str, family: list[str], memory_mib: int | None) -> InputError:
    """The error with the family's other forms, or the nearest names, as what could be meant."""
    joined = "".join(_take_apart(name[:_LONGEST]).family)
    families = {"".join(words.family): words for words in _catalogue().values()}
    nearest = {i: abs(_allocatable_mib(i) - (memory_mib or 0)) if memory_mib else 0.0 for i in family}
    near = sorted(family, key=lambda identifier: nearest[identifier]) or [
        identifier
        for match in difflib.get_close_matches(joined, families, n=3, cutoff=0.5)
        for identifier, words in _catalogue().items()
        if "".join(words.family) == match
    ]
    size = f" with {memory_mib} MiB" if memory_mib is not None else ""
    return InputError(
        "this GPU is not in the catalogue",
        where="GPU",
        got=f"{shown(name)}{size}",
        allowed=f"nearest: {', '.join(near)}" if near else f"one of {len(accelerator_ids())} accelerators",
        hint="the name is cut: `nvidia-smi -L` prints it whole"
        if is_cut(name)
        else "to plan with the figures of another: --gpu NAME (`planner gpus` lists them with memory and rates)",
    )
