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
PLAN_FILE = "plan.json"
"""The planner's own answer, which it writes beside the files of a framework."""
STDIN, PIPE = Path("-"), Path("/dev/stdin")


def load_configuration(
    paths: Sequence[Path], reader: str | None = None, texts: Mapping[str, str] | None = None
) -> tuple[Configuration, dict[str, str]]:
    """The configuration that the files hold (or ``texts``, if given), and their texts by name."""
    if reader is not None:
        one_of(reader, "--format", [known.name for known in READERS])
    files = _from_disk(paths) if texts is None else {name: texts[name] for name in texts if not no_configuration(name)}
    if not files:
        raise InputError("no file is given", where="FILE", hint="name a configuration file or its folder")
    return read_configuration(files, reader=reader), files


def _from_disk(paths: Sequence[Path]) -> dict[str, str]:
    files: dict[str, str] = {}
    for path in paths:
        for name, text in _texts(path).items():
            # Files of one name in two folders are two files.
            files[name if files.get(name, text) == text else _whole(path, name)] = text
    return files


def _texts(path: Path) -> dict[str, str]:
    """Name -> text of a file, of the files of a folder, or of standard input."""
    if path == STDIN:
        return {"standard-input": read_text(PIPE, "standard input")}
    try:
        return _folder(path) if path.is_dir() else {path.name: read_text(path, str(path))}
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise InputError(
            f"this cannot be read: {reason}", where=shown(str(path)), hint="check path and permissions"
        ) from problem


def no_configuration(name: str) -> bool:
    """Whether a file of a folder was written for people, or by the planner for itself."""
    return name == PLAN_FILE or name.lower().endswith(".md")


def _whole(path: Path, name: str) -> str:
    return path.as_posix() if path.name == name else (path / name).as_posix()


def _folder(folder: Path) -> dict[str, str]:
    """The text files of a folder, not of the folders in it."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and not no_configuration(path.name))
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
