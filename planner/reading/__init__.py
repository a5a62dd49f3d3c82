"""Existing configurations of the frameworks, read into the planner's words.

``read_configuration`` finds the format and reads it; readers, one module a format, are tried in the order of
``READERS``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, Reader, StatedStrategy
from planner.reading.deepspeed.reader import DeepSpeedReader
from planner.reading.fsdp.module import FsdpModuleReader
from planner.reading.huggingface.reader import AccelerateReader, TrainingArgumentsReader
from planner.reading.huggingface.recipes import RecipeReader
from planner.reading.megatron.bridge import MegatronBridgeOverrides
from planner.reading.megatron.reader import MegatronArguments, MegatronDump
from planner.reading.nanotron.reader import NanotronReader
from planner.reading.pytorch import RunConfigReader
from planner.reading.texts.lenient_json import parse_lenient
from planner.reading.texts.yaml_lines import load_yaml
from planner.reading.torchtitan.reader import TorchtitanReader

__all__ = ["READERS", "Configuration", "Files", "Reader", "StatedStrategy", "read_configuration"]

READERS: tuple[Reader, ...] = (
    RunConfigReader(),
    FsdpModuleReader(),
    TorchtitanReader(),
    NanotronReader(),
    AccelerateReader(),
    RecipeReader(),
    TrainingArgumentsReader(),
    DeepSpeedReader(),
    MegatronDump(),
    MegatronBridgeOverrides(),
    MegatronArguments(),
)
"""Every format, the most specific first."""


_TOGETHER = ("accelerate", "recipe", "training-arguments", "deepspeed-json")
"""Formats whose files make up one configuration: accelerate and the Trainer name a DeepSpeed file."""
_SPREAD = ("megatron-arguments", "megatron-bridge-overrides", "torchtitan")
"""Formats that one configuration may spread over several files: scripts that source others, a module with flags."""


def read_configuration(files: Files, *, reader: str | None = None) -> Configuration:
    """The configuration that ``files`` hold; ``reader`` names the format where it is known."""
    for candidate in READERS:
        if candidate.name == reader or (reader is None and candidate.recognises(files)):
            if len(files) > 1:
                _check_one(files, candidate, named=reader is not None)
            return candidate.read(files)
    if not any(text.strip() for text in files.values()):
        raise InputError("there is nothing in it", where=", ".join(sorted(files)), hint="name another file")
    _check_syntax(files)
    raise InputError(
        "this is no training configuration that can be read",
        where=", ".join(sorted(files)),
        got=_beginning(files),
        allowed="; ".join(f"{candidate.name} ({candidate.title})" for candidate in READERS),
        hint="name the format with --format if it is one of these",
    )


def _check_syntax(files: Files) -> None:
    """A file that is malformed for what its name says is that, before it is no configuration."""
    for name in sorted(files):
        if name.endswith((".yaml", ".yml")):
            load_yaml(name, files[name])
        elif name.endswith((".json", ".jsonc")):
            parse_lenient(files[name], where=name)
        elif name.endswith(".toml"):
            try:
                tomllib.loads(files[name])
            except tomllib.TOMLDecodeError as problem:
                raise InputError(f"this is not TOML: {problem}", where=name, hint="check the line named") from problem


def _check_one(files: Files, chosen: Reader, *, named: bool) -> None:
    """Refuse files of several frameworks, or several configurations of one: which of them is meant is not guessed."""
    formats = {name: found for name in sorted(files) if (found := _format({name: files[name]})) is not None}
    family = _TOGETHER if chosen.name in _TOGETHER else (chosen.name,)
    if not named and any(each.name not in family for each in formats.values()):
        raise InputError(
            "these files belong to several frameworks",
            where=", ".join(formats),
            got=_listed(formats),
            allowed="the files of one configuration",
            hint="name those of one framework",
        )
    alike = {name: each for name, each in formats.items() if each.name == chosen.name}
    if len(alike) > 1 and chosen.name not in _SPREAD:
        raise InputError(
            f"{len(alike)} of these files are a configuration each",
            where=", ".join(alike),
            got=_listed(alike),
            allowed="the files of one configuration",
            hint="name one of them",
        )


def _format(files: Files) -> Reader | None:
    return next((candidate for candidate in READERS if candidate.recognises(files)), None)


def _listed(formats: Mapping[str, Reader]) -> str:
    return "; ".join(f"{name}: {reader.title}" for name, reader in formats.items())


def _beginning(files: Files) -> str:
    """The first line with content, to show what was looked at."""
    lines = (line.strip() for text in files.values() for line in text.splitlines())
    return repr(next((line for line in lines if line), "")[:80])
