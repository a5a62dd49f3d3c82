"""Writes single result files: whole or not at all, and never over an existing file unasked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from planner.errors import InputError
from planner.specs.problems import shown


def check_target(
    path: Path, option: str, *, force: bool, others: Iterable[tuple[Path, str]] = (), made: Path | None = None
) -> None:
    """Refuse a file that cannot be written, before work is spent on it; ``others`` are files that must not be replaced,
    with the option that names them, ``made`` is a folder that the command makes where it does not exist."""
    place = shown(str(path))
    try:
        exists, regular = path.exists() or path.is_symlink(), path.is_file()
        parent = _target(path).parent
        folder, writable = parent.is_dir(), os.access(parent, os.W_OK)
        coming = made is not None and not made.exists() and _target(made) == parent
        taken = next((used for other, used in others if _target(other) == _target(path)), None)
    except (OSError, ValueError):
        exists, regular, folder, writable, coming, taken = False, False, False, False, False, None
    if taken is not None:
        raise InputError(
            f"this file is also what {taken} names",
            where=option,
            got=place,
            allowed="a file of its own",
            hint="name another",
        )
    if exists and not regular:
        raise InputError(
            "this is not a file that can be replaced", where=option, got=place, allowed="a file", hint="name another"
        )
    if coming:
        return
    if not folder:
        raise InputError(
            "the folder does not exist", where=option, got=place, allowed="an existing folder", hint="create it first"
        )
    if not writable:
        raise InputError(
            "the folder cannot be written to",
            where=option,
            got=place,
            allowed="a folder with write permission",
            hint="choose a place that you may write to",
        )
    if exists and not force:
        raise InputError(
            "the file exists already", where=option, got=place, hint="pass --force to replace it, or name another"
        )


def _target(path: Path) -> Path:
    """The file itself, behind links."""
    return Path(os.path.realpath(path))


def write_file(path: Path, content: bytes, option: str) -> None:
    """Write aside and rename, so that a full disk leaves the old file; a link stays, and what it points to is
    replaced."""
    try:
        target = _target(path)
        handle, name = tempfile.mkstemp(prefix=".writing-", dir=target.parent)
        staged = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            staged.chmod(0o644)
            os.replace(staged, target)
        finally:
            staged.unlink(missing_ok=True)
    except (OSError, ValueError) as problem:
        raise InputError(
            f"the file could not be written: {getattr(problem, 'strerror', None) or problem}",
            where=option,
            got=shown(str(path)),
            hint="choose a place that you may write to",
        ) from problem
