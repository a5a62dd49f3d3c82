"""From a model's name, Hugging Face configuration or dimension file to its spec, with what had to be assumed.

Unknown architectures are refused by the readers below; nothing is guessed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from planner.catalog import load_model, model_assumption
from planner.catalog.huggingface import ModelReading, read_model_config, read_model_fields
from planner.cost.params import total_params
from planner.errors import InputError
from planner.service.inputs import checked_text, read_mapping, read_text
from planner.service.requests import StatedModel
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption
from planner.specs.problems import input_error
from planner.units import count

MODEL_HINT = "name a model of `planner models`, or a config.json, or a YAML file of dimensions"
FILE_SUFFIXES = (".json", ".yaml", ".yml")
PARAMS_TOLERANCE = 0.05
"""Computed and published parameter counts further apart than this are reported."""

_DIMENSIONS: dict[str, FieldInfo] = {**ModelSpec.model_fields, "name": FieldInfo(default="model")}
"""Fields of a model of one's own, for which a name is made up."""
Resolved = tuple[ModelSpec, tuple[Assumption, ...], tuple[str, ...]]
"""The spec, what had to be assumed, and what is worth a warning."""


def resolve_model(given: str | StatedModel) -> Resolved:
    """The model meant by a catalogue name, a Hugging Face config.json (or its folder), a YAML file of dimensions, or by
    the same as data."""
    if isinstance(given, StatedModel):
        return _stated(given)
    name = checked_text(given, "--model", MODEL_HINT)
    path = Path(name).expanduser()
    if name.lower().endswith(FILE_SUFFIXES) or name.startswith((".", "/", "~")):
        return _from_file(path)
    try:
        return _of_catalogue(name)
    except InputError:
        if path.exists():
            return _from_file(path)
        raise


def _of_catalogue(name: str) -> Resolved:
    entry = load_model(name)
    sentence = model_assumption(name)
    assumed = (Assumption(field="model", value=entry.id, why=sentence),) if sentence else ()
    return entry.spec, assumed, ()


def _stated(given: StatedModel) -> Resolved:
    if given.config is not None:
        return _checked(read_model_fields(dict(given.config), "model.config"))
    if given.dimensions is not None:
        return _of_dimensions({"name": "model", **given.dimensions}, "model.dimensions")
    return _of_catalogue(checked_text(given.name, "--model", MODEL_HINT))


def _of_dimensions(content: Mapping[str, Any], where: str) -> Resolved:
    try:
        # Strict, for true is no number; as JSON, in which lists become tuples.
        return ModelSpec.model_validate_json(json.dumps(content, default=str), strict=True), (), ()
    except ValidationError as problem:
        raise input_error(problem, where, _DIMENSIONS) from problem


def _from_file(path: Path) -> Resolved:
    if path.suffix.lower() in (".yaml", ".yml"):
        return _of_dimensions({"name": path.stem, **read_mapping(path, "--model")}, str(path))
    config = path / "config.json" if path.is_dir() else path
    if not config.exists():
        raise InputError(
            "there is no such file",
            where="--model",
            got=str(config),
            allowed="a config.json or its folder",
            hint=MODEL_HINT,
        )
    read_text(config, "--model")  # refuses folders, huge files and binary files before anything is parsed
    return _checked(read_model_config(path))


def _checked(reading: ModelReading) -> Resolved:
    """A configuration that was read, with a warning where its checkpoint has another size."""
    warnings = list(reading.notes)
    computed = total_params(reading.spec)
    published = reading.published_params
    if published and abs(computed - published) > PARAMS_TOLERANCE * published:
        warnings.append(
            f"{count(computed)} parameters follow from the dimensions, but the checkpoint holds {count(published)}: "
            "check the configuration"
        )
    return reading.spec, (), tuple(warnings)
