"""The matrix of what each framework expresses is what its rules say, not a list of its own."""

from __future__ import annotations

from typing import Any

import pytest

from planner.backends import BACKENDS
from planner.service.matrix import list_backends


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in list_backends()}


def test_known_facts(rows: dict[str, dict[str, Any]]) -> None:
    """What everybody knows of the three compared frameworks."""
    megatron, deepspeed, fsdp = (rows[name]["expresses"] for name in ("megatron", "deepspeed", "fsdp"))
    assert all(megatron[name] for name in ("tp", "sequence_parallel", "cp", "pp", "vpp", "ep", "etp", "uneven_stages"))
    assert deepspeed["pp"]
    assert not deepspeed["vpp"]
    assert not deepspeed["sequence_parallel"]
    assert deepspeed["parameter_offload"]
    assert fsdp["hybrid_shard"]
    assert not fsdp["pp"]
    assert "nvfp4" in megatron["precisions"]
    assert "fp8" not in deepspeed["precisions"]
    assert rows["megatron"]["zero_stages"] == [0, 1]
    assert rows["fsdp"]["recompute"] == ["full", "none", "selective"]


def test_every_framework_and_a_filter(rows: dict[str, dict[str, Any]]) -> None:
    """In the order of the registry; a part of a name picks some."""
    assert list(rows) == list(BACKENDS)
    assert [row["id"] for row in list_backends("deepspeed")] == [name for name in BACKENDS if "deepspeed" in name]


def test_only_what_the_space_holds(rows: dict[str, dict[str, Any]]) -> None:
    """accelerate's FSDP2 has no unsharded stage; nanotron shards over all replicas or none."""
    assert rows["accelerate-fsdp"]["zero_stages"] == [2, 3]
    assert not rows["nanotron"]["expresses"]["hybrid_shard"]
    assert rows["fsdp"]["expresses"]["hybrid_shard"]
