"""Existing configurations of the frameworks, read into the planner's words.

``read_configuration`` finds the format and reads it; readers, one module a format, are tried in the order of
``READERS``."""

from __future__ import annotations

from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, Reader, StatedStrategy
from planner.reading.deepspeed.reader import DeepSpeedReader
from planner.reading.fsdp.module import FsdpModuleReader
from planner.reading.huggingface.reader import AccelerateReader, TrainingArgumentsReader
from planner.reading.huggingface.recipes import RecipeReader
from planner.reading.megatron.bridge import MegatronBridgeOverrides
from planner.reading.megatron.reader import MegatronArguments, MegatronDump
from planner.reading.nanotron.reader import NanotronReader
from planner.reading.torchtitan.reader import TorchtitanReader

__all__ = ["READERS", "Configuration", "Files", "Reader", "StatedStrategy", "read_configuration"]

READERS: tuple[Reader, ...] = (
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


def read_configuration(files: Files, *, reader: str | None = None) -> Configuration:
    """The configuration that ``files`` hold; ``reader`` names the format where it is known."""
    for candidate in READERS:
        if candidate.name == reader or (reader is None and candidate.recognises(files)):
            return candidate.read(files)
    raise InputError(
        "this is no training configuration that can be read",
        where=", ".join(sorted(files)),
        got=_beginning(files),
        allowed="; ".join(candidate.title for candidate in READERS),
        hint="name the format with --format if it is one of these",
    )


def _beginning(files: Files) -> str:
    """The first line with content, to show what was looked at."""
    lines = (line.strip() for text in files.values() for line in text.splitlines())
    return repr(next((line for line in lines if line), "")[:80])
