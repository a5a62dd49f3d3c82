"""How a machine profile enters the cost model: factors on the constants, and on the memory that the allocator needs."""

from __future__ import annotations

from dataclasses import replace

from planner.backends.base import Backend
from planner.cost.constants import published_constants
from planner.cost.context import CostContext
from planner.specs.profile import Profile


def profiled(context: CostContext, profile: Profile) -> CostContext:
    """The same question on the calibrated machine."""
    return replace(
        context,
        table=published_constants().with_factors(profile.factors),
        backend=with_memory_factor(context.backend, profile.memory_factor),
    )


def with_memory_factor(backend: Backend, factor: float) -> Backend:
    """The framework whose ranks need ``factor`` times the memory, before context and communication buffers."""
    if factor == 1.0:
        return backend
    return backend.with_habits(memory_factor=backend.habits.memory_factor * factor)
