"""The use cases that the command line, the API and library users call; each stands in a module of its own.

What few commands need (measured runs, reading configurations and machines, walking every framework's space) is loaded
when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.service.catalogs import list_gpus, list_models
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
    from planner.service.checked import CheckRequest
    from planner.service.checking import check
    from planner.service.conversion import Converted, convert_document, convert_files
    from planner.service.diagnosis import diagnose
    from planner.service.machines import MachinesReading, MachinesRequest, read_cluster
    from planner.service.matrix import list_backends
    from planner.service.measured import AccuracyRequest, accuracy, calibrate

_LATER = {
    "AccuracyRequest": "measured",
    "accuracy": "measured",
    "calibrate": "measured",
    "CheckRequest": "checked",
    "check": "checking",
    "Converted": "conversion",
    "convert_document": "conversion",
    "convert_files": "conversion",
    "diagnose": "diagnosis",
    "MachinesReading": "machines",
    "MachinesRequest": "machines",
    "read_cluster": "machines",
    "list_backends": "matrix",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"planner.service.{_LATER[name]}"), name)


__all__ = [
    "AccuracyRequest",
    "CheckRequest",
    "ClusterInput",
    "Converted",
    "Interrupted",
    "JobInput",
    "MachinesReading",
    "MachinesRequest",
    "PlanRequest",
    "StrategyInput",
    "accuracy",
    "calibrate",
    "check",
    "check_output",
    "convert_document",
    "convert_files",
    "diagnose",
    "estimate",
    "estimate_document",
    "list_backends",
    "list_gpus",
    "list_models",
    "load_plan",
    "read_cluster",
    "render_document",
    "resolve_cluster",
    "resolve_job",
    "resolve_model",
    "start_commands",
    "suggest",
    "write_document",
]
