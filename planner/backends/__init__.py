"""The frameworks for which plans are made, in the order in which they are tried and shown."""

from __future__ import annotations

from difflib import get_close_matches

from planner.backends.accelerate import AccelerateDeepSpeed, AccelerateFsdp
from planner.backends.base import Backend
from planner.backends.bridge import MegatronBridge
from planner.backends.deepspeed import DeepSpeed
from planner.backends.fsdp import Fsdp
from planner.backends.megatron import Megatron
from planner.backends.nanotron import Nanotron
from planner.backends.pytorch import PyTorch
from planner.backends.torchtitan import Torchtitan
from planner.errors import InputError

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Megatron(),
        DeepSpeed(),
        Fsdp(),
        MegatronBridge(),
        AccelerateFsdp(),
        AccelerateDeepSpeed(),
        Torchtitan(),
        Nanotron(),
        PyTorch(),
    )
}
"""Every backend by its name."""

COMPARED = ("megatron", "deepspeed", "fsdp")
"""What ``auto`` compares; the others run the same step in another spelling, or are asked for by name."""


def get_backend(name: str) -> Backend:
    """The backend called ``name`` (case and surrounding space do not matter)."""
    wanted = name.strip().lower()
    if wanted in BACKENDS:
        return BACKENDS[wanted]
    near = get_close_matches(wanted, BACKENDS, n=1, cutoff=0.5)
    raise InputError(
        "unknown backend",
        where="backend",
        got=name,
        allowed=", ".join(BACKENDS),
        hint=f"did you mean {near[0]}?" if near else "`planner backends` lists what each framework can run",
    )
