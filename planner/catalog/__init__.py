"""Models, accelerators and node types by name: facts with their source and date, one YAML file each."""

from planner.catalog.entries import ModelEntry, PublishedParams
from planner.catalog.loader import (
    CATALOG_VERSION,
    accelerator_ids,
    default_system,
    load_accelerator,
    load_model,
    load_system,
    model_assumption,
    model_ids,
    resolve_accelerator,
    resolve_model,
    resolve_system,
    system_ids,
)

__all__ = [
    "CATALOG_VERSION",
    "ModelEntry",
    "PublishedParams",
    "accelerator_ids",
    "default_system",
    "load_accelerator",
    "load_model",
    "load_system",
    "model_assumption",
    "model_ids",
    "resolve_accelerator",
    "resolve_model",
    "resolve_system",
    "system_ids",
]
