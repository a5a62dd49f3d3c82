"""The use cases that the command line and library users call; see usecases.py, measured.py, catalogs.py and
requests.py.

What compares with measured runs is loaded when it is first asked for: planning needs none of it."""

from typing import TYPE_CHECKING, Any

from planner.service.catalogs import list_backends, list_gpus, list_models
from planner.service.clusters import resolve_cluster
from planner.service.document import load_plan
from planner.service.failures import Interrupted
from planner.service.jobs import resolve_job
from planner.service.models import resolve_model
from planner.service.requests import ClusterInput, JobInput, PlanRequest, StrategyInput
from planner.service.usecases import (
    check_output,
    estimate,
    estimate_document,
    render_document,
    start_commands,
    suggest,
    write_document,
)

if TYPE_CHECKING:
    from planner.service.measured import AccuracyRequest, accuracy, calibrate

_MEASURED = ("AccuracyRequest", "accuracy", "calibrate")


def __getattr__(name: str) -> Any:
    if name not in _MEASURED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from planner.service import measured

    return getattr(measured, name)


__all__ = [
    "AccuracyRequest",
    "ClusterInput",
    "Interrupted",
    "JobInput",
    "PlanRequest",
    "StrategyInput",
    "accuracy",
    "calibrate",
    "check_output",
    "estimate",
    "estimate_document",
    "list_backends",
    "list_gpus",
    "list_models",
    "load_plan",
    "render_document",
    "resolve_cluster",
    "resolve_job",
    "resolve_model",
    "start_commands",
    "suggest",
    "write_document",
]
