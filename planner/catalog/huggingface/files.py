"""Reads the files of a checkpoint folder: the configuration, the weight index, and nothing else.

Whatever cannot be read as JSON is an error with the reason; large files and weights are never loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.catalog.huggingface.fields import Fields
from planner.errors import InputError

_LARGEST_FILE_BYTES = 64 * 1024**2
_CONFIG_NAMES = ("config.json", "params.json", "adapter_config.json")
_CHECKPOINTS = "give the config.json of the checkpoint"
_INDEX_NAME = "model.safetensors.index.json"


def find_config(path: Path) -> Path:
    """The configuration file that a path means: itself, or the one in the folder."""
    try:
        if path.is_dir():
            found = next((path / name for name in _CONFIG_NAMES if (path / name).is_file()), None)
            if found is None:
                raise InputError(
                    "the folder holds no model configuration",
                    where=str(path),
                    allowed=f"a folder with {' or '.join(_CONFIG_NAMES[:2])}",
                    hint="give the folder of the downloaded checkpoint, or its config.json",
                )
            return found
        if not path.exists():
            raise InputError(
                "there is no such file", where=str(path), hint="check the path; `planner models` lists names"
            )
        if not path.is_file():
            raise InputError(
                "this is neither a file nor a folder", where=str(path), hint="give a config.json or its folder"
            )
    except (OSError, ValueError) as error:
        raise InputError(
            f"the file cannot be read: {error}", where=repr(str(path)), hint="give a config.json"
        ) from None
    return path


def read_json(path: Path) -> Fields:
    """The JSON object of a file."""
    where = str(path)
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise InputError(
                "the file is too large for a configuration", where=where, hint="give the config.json, not the weights"
            )
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("the file is not text", where=where, hint="give the config.json, not the weights") from None
    except (OSError, ValueError) as error:
        raise InputError(f"the file cannot be read: {error}", where=where, hint="check path and permissions") from None
    return Fields(_parse(text, where), where)


def _parse(text: str, where: str) -> dict[str, Any]:
    if not text.strip():
        raise InputError("the file is empty", where=where, hint="download the config.json again")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"the file is not JSON: {error.msg} in line {error.lineno}, column {error.colno}",
            where=where,
            hint=_CHECKPOINTS,
        ) from None
    except RecursionError:
        raise InputError(
            "the file is nested too deeply to be a model configuration", where=where, hint=_CHECKPOINTS
        ) from None
    except ValueError as error:
        raise InputError(f"a value cannot be read: {error}", where=where, hint=_CHECKPOINTS) from None
    if not isinstance(value, dict):
        raise InputError(
            "the file holds no JSON object",
            where=where,
            got=type(value).__name__,
            allowed="a JSON object {...}",
            hint=_CHECKPOINTS,
        )
    return value


def stored_params(config_path: Path, bytes_per_param: float | None) -> int | None:
    """Parameters of the checkpoint beside the configuration, from the weight index; None when it does not tell."""
    index = config_path.parent / _INDEX_NAME
    if config_path.name != "config.json" or not index.is_file():
        return None
    metadata = read_json(index).nested("metadata")
    if metadata is None:
        return None
    for name, divisor in (("total_parameters", 1.0), ("total_size", bytes_per_param)):
        value = metadata.number(name, 0.0)
        if value > 0 and divisor:
            return round(value / divisor)
    return None
