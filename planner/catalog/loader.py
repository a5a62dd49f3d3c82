"""Finds catalogue entries by the names people type and reads only the files that a question needs.

One small index (data/aliases.yaml) maps every name to an id, so resolving two names parses three files.  Nothing is
guessed: a name that fits no entry, or several, is an error that lists the candidates.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from planner.catalog.entries import ModelEntry
from planner.errors import InputError
from planner.specs.cluster import Accelerator, System

CATALOG_VERSION = "2026.08.1"
"""Changes with every change of the data; part of a plan's id."""

DATA = Path(__file__).parent / "data"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LONGEST_NAME = 200
_LISTINGS = {"models": "`planner models`", "accelerators": "`planner gpus`"}
"""Commands that list all names of a kind."""

# Words of checkpoint or marketing names that do not change the dimensions.
_MODEL_NOISE = frozenset({"instruct", "chat", "hf", "base", "it", "pt", "meta"})
_DEVICE_NOISE = frozenset({"nvidia", "amd", "instinct", "tesla", "geforce", "google", "aws", "intel"})


def read_yaml(path: Path) -> Any:
    """One data file as plain Python values."""
    with path.open("rb") as file:
        return yaml.load(file, Loader=_Loader)  # noqa: S506 - always a safe loader, the C one where it is built


@lru_cache(maxsize=1)
def _index() -> dict[str, Any]:
    data: dict[str, Any] = read_yaml(DATA / "aliases.yaml")
    return data


@lru_cache(maxsize=3)
def _ids(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (DATA / kind).glob("*.yaml")))


def model_ids() -> tuple[str, ...]:
    """Every model of the catalogue, sorted."""
    return _ids("models")


def accelerator_ids() -> tuple[str, ...]:
    """Every accelerator of the catalogue, sorted."""
    return _ids("accelerators")


def system_ids() -> tuple[str, ...]:
    """Every node type of the catalogue, sorted."""
    return _ids("systems")


def canonical(name: str, noise: Iterable[str] = ()) -> str:
    """The form under which names are compared.

    Lower case, no organisation prefix, no noise words, and hyphens only between digits: both ``llama3-70b`` and
    ``meta-llama/Llama-3-70B-Instruct`` give ``llama3-70b``.
    """
    words = re.split(r"[-_\s:]+", name.strip().lower().rsplit("/", 1)[-1])
    text = "-".join(word for word in words if word and word not in noise)
    return re.sub(r"(?<!\d)-|-(?!\d)", "", text)


def _noise(kind: str) -> frozenset[str]:
    return _MODEL_NOISE if kind == "models" else _DEVICE_NOISE


@lru_cache(maxsize=3)
def _names(kind: str) -> dict[str, str]:
    """Canonical name -> id, ids and aliases together."""
    noise = _noise(kind)
    names = {canonical(alias, noise): target for alias, target in _index()[kind].items()}
    names.update({canonical(identifier, noise): identifier for identifier in _ids(kind)})
    return names


@lru_cache(maxsize=1)
def _ambiguous() -> dict[str, list[str]]:
    """Canonical short name -> the models it may mean."""
    return {canonical(short, _MODEL_NOISE): models for short, models in _index()["ambiguous"].items()}


def _resolve(kind: str, name: str) -> str:
    what = kind.removesuffix("s")
    if not name.strip() or len(name) > _LONGEST_NAME:
        limits = f"1 to {_LONGEST_NAME} characters"
        raise InputError(
            f"a name ({what}) must have {limits}",
            where=what,
            got=f"{len(name)} characters",
            allowed=_allowed(kind),
            hint=_near_hint(kind, ""),
        )
    if name in _ids(kind):
        return name
    key = canonical(name, _noise(kind))
    found = _names(kind).get(key)
    if found is not None:
        return found
    candidates = _ambiguous().get(key) if kind == "models" else None
    if candidates:
        raise InputError(
            f"{name!r} fits several models",
            where=what,
            got=name,
            allowed=", ".join(candidates),
            hint=f"name the one you mean, for example {candidates[0]}",
        )
    raise InputError(
        f"unknown {what} {name!r}",
        where=what,
        got=name,
        allowed=_allowed(kind),
        hint=_near_hint(kind, key),
    )


def _allowed(kind: str) -> str:
    """All names where no command lists them."""
    return f"one of the {len(_ids(kind))} {kind} of the catalogue" if kind in _LISTINGS else ", ".join(_ids(kind))


def _near_hint(kind: str, key: str) -> str:
    names = _names(kind)
    near = list(dict.fromkeys(names[match] for match in difflib.get_close_matches(key, names, n=6, cutoff=0.6)))
    start = f"did you mean {' or '.join(near[:3])}? " if near else ""
    if kind not in _LISTINGS:
        return start.strip() or "use one of the allowed names, or leave it out"
    config = "; a config.json or its folder can be given too" if kind == "models" else ""
    return f"{start}{_LISTINGS[kind]} lists all names{config}"


def resolve_model(name: str) -> str:
    """The id that a model name or alias means; InputError with near names when it means none or several."""
    return _resolve("models", name)


def resolve_accelerator(name: str) -> str:
    """The id that an accelerator name or alias means."""
    return _resolve("accelerators", name)


def resolve_system(name: str) -> str:
    """The id that a node type's name means."""
    return _resolve("systems", name)


def model_assumption(name: str) -> str | None:
    """What must be said when a bare size was taken as a model (``70b`` -> Llama 3.1 70B); None for full names."""
    sentence: str | None = _index()["sizes"].get(canonical(name, _MODEL_NOISE))
    return sentence


def load_model(name: str) -> ModelEntry:
    """The catalogue entry of a model by id, alias, size, or hub name."""
    return _load_model(resolve_model(name))


@cache
def _load_model(identifier: str) -> ModelEntry:
    data = read_yaml(DATA / "models" / f"{identifier}.yaml")
    data["spec"]["name"] = data["id"]
    return ModelEntry.model_validate(data)


def load_accelerator(name: str) -> Accelerator:
    """An accelerator by id or alias (also the name that nvidia-smi prints)."""
    return _load_accelerator(resolve_accelerator(name))


@cache
def _load_accelerator(identifier: str) -> Accelerator:
    return Accelerator.model_validate(read_yaml(DATA / "accelerators" / f"{identifier}.yaml"))


def load_system(name: str) -> System:
    """A reference node type by id or alias."""
    return _load_system(resolve_system(name))


@cache
def _load_system(identifier: str) -> System:
    return System.model_validate(read_yaml(DATA / "systems" / f"{identifier}.yaml"))


def default_system(accelerator: str) -> System:
    """The node type assumed for an accelerator when the user names none."""
    return load_system(_index()["default_systems"][resolve_accelerator(accelerator)])
