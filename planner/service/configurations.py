"""Existing configurations from disk: one file, several that belong together, or a folder, as a ``Configuration``.

Sizes and counts are guarded here; what the texts mean is for the readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.errors import InputError
from planner.reading import READERS, Configuration, read_configuration
from planner.service.inputs import one_of, read_text
from planner.specs.problems import shown

MOST_FILES = 64
NOT_CONFIGURATION = ("plan.json", "README.md")
"""Of a rendered folder: what the planner wrote for itself and for people."""


def load_configuration(paths: Sequence[Path], reader: str | None = None) -> tuple[Configuration, tuple[str, ...]]:
    """The configuration that the files hold, and their names."""
    if reader is not None:
        one_of(reader, "--format", [known.name for known in READERS])
    files: dict[str, str] = {}
    for path in paths:
        # Files of one name in two folders are two files.
        files |= _folder(path) if path.is_dir() else {_name(path, files): read_text(path, str(path))}
    if not files:
        raise InputError("no file is given", where="FILE", hint="name a configuration file or its folder")
    return read_configuration(files, reader=reader), tuple(sorted(files))


def _name(path: Path, taken: Mapping[str, str]) -> str:
    return path.as_posix() if path.name in taken else path.name


def _folder(folder: Path) -> dict[str, str]:
    """The text files of a folder, not of the folders in it."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in NOT_CONFIGURATION)
    if not found:
        raise InputError(
            "this folder holds no configuration", where=shown(str(folder)), hint="name the folder that holds the files"
        )
    if len(found) > MOST_FILES:
        raise InputError(
            f"this folder holds {len(found)} files",
            where=shown(str(folder)),
            allowed=f"at most {MOST_FILES}",
            hint="name the configuration files themselves",
        )
    texts: dict[str, str] = {}
    for path in found:
        try:
            texts[path.name] = read_text(path, str(path))
        except InputError:
            # Data, archives and pictures may lie beside a configuration.
            continue
    return texts
