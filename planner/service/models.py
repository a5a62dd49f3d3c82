"""From a model's name, Hugging Face configuration or dimension file to its spec, with what had to be assumed.

Unknown architectures are refused by the readers below; nothing is guessed here.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from planner.catalog import load_model, model_assumption
from planner.catalog.huggingface import read_model_config
from planner.cost.params import total_params
from planner.errors import InputError
from planner.service.inputs import checked_text, read_mapping, read_text
from planner.specs.model import ModelSpec
from planner.specs.plan import Assumption
from planner.specs.problems import input_error
from planner.units import count

MODEL_HINT = "name a model of `planner models`, or a config.json, or a YAML file of dimensions"
FILE_SUFFIXES = (".json", ".yaml", ".yml")
PARAMS_TOLERANCE = 0.05
"""Computed and published parameter counts further apart than this are reported."""


def resolve_model(text: str) -> tuple[ModelSpec, tuple[Assumption, ...], tuple[str, ...]]:
    """The model meant by a catalogue name, a Hugging Face config.json (or its folder), or a YAML file of dimensions.

    Returns the spec, what had to be assumed, and what is worth a warning.
    """
    name = checked_text(text, "--model", MODEL_HINT)
    path = Path(name).expanduser()
    if name.lower().endswith(FILE_SUFFIXES) or name.startswith((".", "/", "~")):
        return _from_file(path)
    try:
        entry = load_model(name)
    except InputError:
        if path.exists():
            return _from_file(path)
        raise
    sentence = model_assumption(name)
    assumed = (Assumption(field="model", value=entry.id, why=sentence),) if sentence else ()
    return entry.spec, assumed, ()


def _from_file(path: Path) -> tuple[ModelSpec, tuple[Assumption, ...], tuple[str, ...]]:
    if path.suffix.lower() in (".yaml", ".yml"):
        try:
            return ModelSpec.model_validate({"name": path.stem, **read_mapping(path, "--model")}, strict=False), (), ()
        except ValidationError as problem:
            raise input_error(problem, str(path), ModelSpec.model_fields) from problem
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
    reading = read_model_config(path)
    warnings = list(reading.notes)
    computed = total_params(reading.spec)
    published = reading.published_params
    if published and abs(computed - published) > PARAMS_TOLERANCE * published:
        warnings.append(
            f"{count(computed)} parameters follow from the dimensions, but the checkpoint holds {count(published)}: "
            "check the configuration"
        )
    return reading.spec, (), tuple(warnings)
