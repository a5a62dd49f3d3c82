"""Writes single result files: whole or not at all, and never over an existing file unasked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from planner.errors import InputError
from planner.specs.problems import shown


def check_target(path: Path, option: str, *, force: bool) -> None:
    """Refuse a file that cannot be written, before work is spent on it."""
    try:
        exists, regular, folder = path.exists() or path.is_symlink(), path.is_file(), path.absolute().parent.is_dir()
    except (OSError, ValueError):
        exists, regular, folder = False, False, False
    place = shown(str(path))
    if exists and not regular:
        raise InputError(
            "this is not a file that can be replaced", where=option, got=place, allowed="a file", hint="name another"
        )
    if not folder:
        raise InputError(
            "the folder does not exist", where=option, got=place, allowed="an existing folder", hint="create it first"
        )
    if exists and not force:
        raise InputError(
            "the file exists already", where=option, got=place, hint="pass --force to replace it, or name another"
        )


def write_file(path: Path, content: bytes, option: str) -> None:
    """Write aside and rename, so that a full disk leaves the old file."""
    try:
        handle, name = tempfile.mkstemp(prefix=".writing-", dir=path.absolute().parent)
        staged = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            staged.chmod(0o644)
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    except (OSError, ValueError) as problem:
        raise InputError(
            f"the file could not be written: {getattr(problem, 'strerror', None) or problem}",
            where=option,
            got=shown(str(path)),
            hint="choose a place that you may write to",
        ) from problem
