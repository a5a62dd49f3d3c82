"""The choices that a question leaves open before any rule is asked, with the pins kept.

A pinned value that is none of them is an InputError with those that are; ``check`` finds that without enumerating
anything, so that a question can be refused before it waits for a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.backends.base import OffloadChoice, RecomputeKind
from planner.cost.context import CostContext
from planner.errors import InputError
from planner.search.grid import divisors
from planner.search.outcome import Pin
from planner.search.pins import keep_pinned, places, read_pins, refused
from planner.specs.batch import EVERY_LAYER
from planner.units import counted

MESH = ("tp", "cp", "pp", "dp")
"""Degrees whose product is the number of GPUs."""


@dataclass(frozen=True)
class Choices:
    """Of one backend for one question."""

    context: CostContext
    pins: Mapping[str, Pin]
    """As ``read_pins`` gives them."""
    kinds: tuple[RecomputeKind, ...] = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.context.backend.recompute_kinds(self.context.model, self.context.job)
        object.__setattr__(self, "kinds", kinds)

    def check(self) -> None:
        """Raise InputError for pins that no candidate can have, whatever the rules say."""
        gpus, product = self.context.cluster.gpus, math.prod(int(self.pins.get(name, 1)) for name in MESH)
        if gpus % product or (product != gpus and all(name in self.pins for name in MESH)):
            raise self.no_mesh()
        self.experts()
        if self.pins.get("sequence_parallel") and (
            self.pins.get("tp") == 1 or True not in self.context.backend.sequence_parallel_choices
        ):
            raise self.no_sequence_parallelism()
        self._check_batch()
        self.zero_stages()
        self.recompute()
        self.offload()

    def no_mesh(self) -> InputError:
        """The error for pinned degrees that no split of the GPUs has."""
        gpus = self.context.cluster.gpus
        names = [name for name in MESH if name in self.pins]
        for name in names:
            if gpus % int(self.pins[name]):
                return refused(self.pins, name, f"it must divide the {counted(gpus, 'GPU')}", divisors(gpus))
        product = " * ".join(f"{name}({self.pins[name]})" for name in names)
        value = math.prod(int(self.pins[name]) for name in names)
        return InputError(
            f"{product} = {value}, but the cluster has {counted(gpus, 'GPU')}",
            where=places(names),
            got=", ".join(f"{name}={self.pins[name]}" for name in names),
            allowed="degrees whose product with the others is the number of GPUs",
            hint=f"leave one of {', '.join(names)} open",
        )

    def experts(self) -> tuple[list[int], bool]:
        """Expert-parallel degrees, and whether experts can be spread at all."""
        moe = self.context.model.moe
        spread = divisors(moe.experts) if moe is not None and self.context.backend.expert_degrees else [1]
        degrees = keep_pinned(self.pins, "ep", spread)
        if not degrees:
            why = "it must divide the experts" if len(spread) > 1 else "experts cannot be spread here"
            raise refused(self.pins, "ep", why, spread)
        if len(spread) == 1 and self.pins.get("etp", 1) != 1:
            raise refused(self.pins, "etp", "experts cannot be spread here", [1])
        if "tp" in self.pins and self.pins.get("etp", 1) not in (1, self.pins["tp"]):
            raise refused(self.pins, "etp", "it must be 1 or tp", sorted({1, int(self.pins["tp"])}))
        return degrees, len(spread) > 1

    def no_sequence_parallelism(self) -> InputError:
        """The error for a choice that no tensor-parallel degree has."""
        allowed = sorted({False, *self.context.backend.sequence_parallel_choices})
        return refused(self.pins, "sequence_parallel", "true needs tp > 1 and a framework that has it", allowed)

    def _check_batch(self) -> None:
        total, parts = self.context.job.global_batch, 1
        for name in ("micro_batch", "grad_accum", "dp"):
            parts *= int(self.pins.get(name, 1))
            if total % parts:
                raise self.no_batch(name)

    def no_batch(self, name: str, values: list[int] | None = None) -> InputError:
        """The error for a pin that does not divide the batch."""
        total = self.context.job.global_batch
        why = f"micro_batch * dp * grad_accum must be global_batch({total})"
        return refused(self.pins, name, why, divisors(total) if values is None else values)

    def zero_stages(self) -> list[int]:
        backend = self.context.backend
        stages = keep_pinned(self.pins, "zero_stage", backend.zero_stages)
        if not stages:
            raise refused(self.pins, "zero_stage", f"{backend.title} has no such stage", backend.zero_stages)
        return stages

    def recompute(self) -> tuple[tuple[int, int], ...]:
        """(index of the kind, most layers)."""
        choices = tuple((i, 0 if kind.mode == "none" else EVERY_LAYER) for i, kind in enumerate(self.kinds))
        if "recompute" not in self.pins:
            return choices
        wanted = self.pins["recompute"]
        chosen = tuple(choices[i] for i, kind in enumerate(self.kinds) if wanted in (kind.id, kind.mode))
        if not chosen:
            names = dict.fromkeys([kind.mode for kind in self.kinds] + [kind.id for kind in self.kinds])
            why = f"{self.context.backend.title} does not offer it for this model"
            raise refused(self.pins, "recompute", why, names)
        return chosen

    def offload(self) -> tuple[OffloadChoice | None, ...]:
        backend, has_nvme = self.context.backend, self.context.cluster.nvme_bytes_per_s is not None
        possible = [
            choice for choice in backend.offloads if has_nvme or "nvme" not in (choice.device, choice.parameters)
        ]
        everything: list[OffloadChoice | None] = [None, *possible]
        wanted = self.pins.get("offload")
        chosen = tuple(c for c in everything if wanted in (None, "none" if c is None else c.device))
        if not chosen:
            unknown = wanted == "nvme" and any(choice.device == "nvme" for choice in backend.offloads)
            why = "the cluster names no NVMe rate" if unknown else f"{backend.title} cannot"
            raise refused(self.pins, "offload", why, dict.fromkeys(["none", *(choice.device for choice in possible)]))
        return chosen


def check_choices(context: CostContext, pins: Mapping[str, Pin]) -> None:
    """Raise InputError for pins that no candidate of the context's backend can have."""
    Choices(context, read_pins(pins)).check()
