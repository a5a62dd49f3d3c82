"""Reading of machines: samples of what drivers, schedulers and launchers print."""

from __future__ import annotations

from pathlib import Path

from planner.machines import Inventory, read_machines

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "machines"


def text(name: str) -> str:
    """A sample as it stands in the file, carriage returns included."""
    return (SAMPLES / name).read_bytes().decode()


def read(name: str, source: str | None = None) -> Inventory:
    """A sample, its kind recognised unless it is named."""
    return read_machines(text(name), source=source, where=name)


def ids(inventory: Inventory) -> set[str]:
    """Ids of the findings."""
    return {finding.id for finding in inventory.findings}


def message(inventory: Inventory, identifier: str) -> str:
    """Message, place and hint of the one finding with this id."""
    (found,) = [finding for finding in inventory.findings if finding.id == identifier]
    return f"{found.message} {found.where} {found.hint}"
