"""What is said of a GPU whichever vendor's tool lists it.

So far: that another program uses it."""

from __future__ import annotations

from collections.abc import Iterable

from planner.machines.inventory import Device
from planner.machines.text import warning
from planner.specs.finding import Finding

BUSY_MIB = 1024
"""Memory in use above which another program must be running; drivers and monitors take less."""


def in_use(devices: Iterable[Device], variable: str) -> list[Finding]:
    """The GPUs that are busy; ``variable`` hides a GPU from programs."""
    return [
        warning(
            "gpu-in-use",
            f"GPU {device.index} is in use: {device.used_mib} MiB are taken",
            where=f"GPU {device.index}",
            hint=f"end the other program, or leave the GPU out with {variable}",
        )
        for device in devices
        if device.used_mib is not None and device.used_mib > BUSY_MIB
    ]
