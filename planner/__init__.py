"""Finds the parallel training strategy for a model on a cluster that a named framework can run.

``import planner`` is cheap: the public names below load their modules when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.version import __version__

if TYPE_CHECKING:
    from planner.errors import InfeasibleError, InputError, PlannerError, TimeLimitError
    from planner.service import (
        ClusterInput,
        JobInput,
        PlanRequest,
        StrategyInput,
        estimate,
        list_backends,
        list_gpus,
        list_models,
        load_plan,
        render_document,
        suggest,
    )
    from planner.specs.plan import PlanDocument

_HOMES = {
    "ClusterInput": "planner.service",
    "InfeasibleError": "planner.errors",
    "InputError": "planner.errors",
    "JobInput": "planner.service",
    "PlanDocument": "planner.specs.plan",
    "PlanRequest": "planner.service",
    "PlannerError": "planner.errors",
    "StrategyInput": "planner.service",
    "TimeLimitError": "planner.errors",
    "estimate": "planner.service",
    "list_backends": "planner.service",
    "list_gpus": "planner.service",
    "list_models": "planner.service",
    "load_plan": "planner.service",
    "render_document": "planner.service",
    "suggest": "planner.service",
}

__all__ = [
    "ClusterInput",
    "InfeasibleError",
    "InputError",
    "JobInput",
    "PlanDocument",
    "PlanRequest",
    "PlannerError",
    "StrategyInput",
    "TimeLimitError",
    "__version__",
    "estimate",
    "list_backends",
    "list_gpus",
    "list_models",
    "load_plan",
    "render_document",
    "suggest",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(home), name)
