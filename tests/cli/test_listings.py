"""``planner models``, ``gpus`` and ``backends``: tables for people, records for programs."""

from __future__ import annotations

import pytest

from planner.backends import BACKENDS
from planner.catalog import accelerator_ids, model_ids
from tests.cli.conftest import Cli


def test_models(cli: Cli) -> None:
    """Every model is listed; a text narrows the list by id, alias or family; no match is an empty list."""
    assert [row["id"] for row in cli("models", "--json").document] == list(model_ids())
    assert "llama-3.1-70b" in {row["id"] for row in cli("models", "70b", "--json").document}
    assert cli("models", "no-such-model", "--json").document == []


def test_gpus(cli: Cli) -> None:
    """Every accelerator is listed with memory, rates and node."""
    rows = cli("gpus", "--json").document
    assert [row["id"] for row in rows] == list(accelerator_ids())
    (h100,) = (row for row in rows if row["id"] == "h100-sxm-80gb")
    assert h100["peak_16bit_flops_per_s"] == pytest.approx(989e12, rel=0.01)
    assert "fp8" in h100["precisions"]


def test_backends(cli: Cli) -> None:
    """Each framework says what it can express; rules carry id, reason and source, and --rules prints them."""
    rows = cli("backends", "--json").document
    assert [row["id"] for row in rows] == list(BACKENDS)
    printed = cli("backends", "--rules").out
    for row in rows:
        assert row["rules"]
        for rule in row["rules"]:
            assert rule["id"]
            assert rule["reason"]
            assert rule["source"]
            assert rule["id"] in printed


@pytest.mark.parametrize("command", ["models", "gpus", "backends"])
def test_tables_are_plain(cli: Cli, command: str) -> None:
    """Piped tables are ASCII without colour and fit 100 columns."""
    out = cli(command).out
    assert out.isascii()
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_version(cli: Cli) -> None:
    """--version prints name and version."""
    from planner import __version__

    assert cli("--version").out == f"planner {__version__}\n"
