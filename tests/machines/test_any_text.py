"""Whatever the text: every source gives an inventory or an InputError, and what it gives can be joined and counted."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.machines import SOURCES, Inventory, combine, compute_nics, identify, read_machines, size_of
from planner.machines.hostlist import MAX_HOSTS, expand, holes
from planner.machines.text import clean, decode
from planner.service.clusters import resolve_file
from planner.service.machine_facts import fill
from planner.service.machine_values import Facts
from planner.specs.cluster_file import ClusterFile
from tests.machines import SAMPLES

TEXTS = {path.name: path.read_bytes().decode() for path in sorted(SAMPLES.iterdir())}
SLOW = [HealthCheck.too_slow]
"""A busy machine is no fault of the readers."""
WORDS = sorted({word for content in TEXTS.values() for word in content.replace("=", " = ").split()})
"""Words of all samples: more likely to reach deep into a reader than random characters."""

soup = st.lists(
    st.one_of(
        st.sampled_from(WORDS),
        st.sampled_from(["\n", "\t", ",", ":", "=", "[", "]", "{", "}", "-", "\x1b[4m"]),
        st.text(max_size=4),
    ),
    max_size=60,
).map(" ".join)


def used(inventory: Inventory) -> None:
    """Everything that is done with an inventory works on it, or is refused."""
    json.dumps(asdict(inventory), allow_nan=False)
    assert all((device.name or "a").isprintable() for device in inventory.devices)
    assert all((node.product or "a").isprintable() and node.name.isprintable() for node in inventory.nodes)
    compute_nics(inventory.nics)
    size_of(inventory)
    for finding in inventory.findings:
        assert finding.message.isprintable(), finding
        assert finding.where.isprintable(), finding
        assert finding.hint.isprintable(), finding
    for options in (ClusterFile(), ClusterFile(gpu="h100", nodes=2, gpus_per_node=4)):
        try:
            facts = Facts()
            fill(facts, inventory, options)
            resolve_file(facts.file())
        except InputError:
            continue


def tried(source: str | None, content: str) -> None:
    try:
        inventory = read_machines(content, source=source)
    except InputError:
        return
    used(inventory)
    used(combine([inventory, inventory]))


@pytest.mark.parametrize("source", [None, *SOURCES])
@settings(max_examples=80, suppress_health_check=SLOW)
@given(content=soup)
def test_words_in_any_order(source: str | None, content: str) -> None:
    """Words of real outputs, shuffled and mixed with control characters."""
    tried(source, content)


@pytest.mark.parametrize("source", [None, *SOURCES])
@settings(max_examples=40, suppress_health_check=SLOW)
@given(content=st.text())
def test_any_characters(source: str | None, content: str) -> None:
    """Any text at all."""
    tried(source, content)


@pytest.mark.parametrize("name", list(TEXTS))
def test_damaged_samples(name: str) -> None:
    """Each sample with lines lost, doubled, cut, swapped and characters replaced."""
    rng = random.Random(name)
    for _ in range(25):
        lines = TEXTS[name].splitlines(keepends=True)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(lines))
            change = rng.randrange(5)
            if change == 0:
                del lines[at]
            elif change == 1:
                lines.insert(at, rng.choice(lines))
            elif change == 2:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            elif change == 3:
                lines[at] = lines[at].replace(
                    rng.choice("0123456789,:[]-"), rng.choice(["", "9999999999999999999", "-", "²", "\x00", "["])
                )
            else:
                rng.shuffle(lines)
            lines = lines or ["\n"]
        damaged = "".join(lines)
        tried(None, damaged)
        for source in SOURCES:
            tried(source, damaged)


@settings(max_examples=200, suppress_health_check=SLOW)
@given(raw=st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    """Bytes are text or an InputError."""
    try:
        content = decode(raw, "test")
    except InputError:
        return
    tried(None, content)


@settings(max_examples=200, suppress_health_check=SLOW)
@given(line=st.text(alphabet="n0123456789[]-, .ab", max_size=40))
def test_any_host_list(line: str) -> None:
    """A list is bounded and without repeats that were not written, or refused."""
    try:
        hosts = expand(line)
    except InputError:
        return
    assert 0 < len(hosts) <= MAX_HOSTS
    assert not set(holes(hosts)) & set(hosts)


@settings(max_examples=200, suppress_health_check=SLOW)
@given(
    name=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)),
    mib=st.one_of(st.none(), st.integers(1, 10**8)),
)
def test_any_product(name: str, mib: int | None) -> None:
    """A name means one accelerator, with a memory above zero, or none."""
    try:
        match = identify(name, mib)
    except InputError:
        return
    assert match.memory_gib is None or match.memory_gib >= 0


def test_text_of_windows_shells() -> None:
    """PowerShell redirects as UTF-16 with a byte order mark and CRLF."""
    content = TEXTS["smi_8xh100.csv"]
    raw = content.replace("\n", "\r\n").encode("utf-16")
    assert read_machines(decode(raw, "test")) == read_machines(content)
    assert clean(decode(content.encode("utf-8-sig"), "test")) == content


def test_damage_reaches_the_readers() -> None:
    """The samples themselves are read, so that the tests above start from something."""
    read = [name for name in TEXTS if name not in ("topo_p2p.txt", "slurm_hostlists.txt")]
    assert all(read_machines(TEXTS[name]) for name in read)
    assert len(read) >= 34
