"""Writes rendered files so that a folder holds all of them or is left as it was.

Knows nothing of plans: it takes relative paths and texts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from planner.errors import InputError


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Write ``files`` (relative path -> text) below ``folder`` and return their paths.

    Existing files are refused unless ``force``.  Everything is written aside first and renamed into place at the end,
    so a full disk or a bad path leaves neither half a file nor half a set.
    """
    folder = Path(folder)
    targets = {relative: folder / _inside(relative) for relative in files}
    _refuse_conflicts(folder, targets, force)
    try:
        return _write(folder, files, targets)
    except OSError as error:
        raise InputError(
            f"the files could not be written: {error.strerror or error}",
            where=str(folder),
            hint="choose a folder that you may write to with --out",
        ) from error


def _inside(relative: str) -> PurePosixPath:
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InputError("a rendered file must stay inside its folder", where="files", got=repr(relative))
    return path


def _refuse_conflicts(folder: Path, targets: Mapping[str, Path], force: bool) -> None:
    for parent in (folder, *folder.parents):
        if parent.exists() and not parent.is_dir():
            raise InputError("the output folder is a file", where=str(parent), hint="choose another folder with --out")
    blocked = sorted(str(path) for path in targets.values() if path.is_dir())
    if blocked:
        raise InputError("a folder stands where a file is to be written", where=", ".join(blocked))
    existing = sorted(relative for relative, path in targets.items() if path.exists() or path.is_symlink())
    if existing and not force:
        raise InputError(
            f"these files exist already: {', '.join(existing)}",
            where=str(folder),
            hint="pass --force to overwrite them, or choose another folder with --out",
        )


def _write(folder: Path, files: Mapping[str, str], targets: Mapping[str, Path]) -> list[Path]:
    folder = folder.absolute()
    # Beside a new folder or inside an existing one is the same file system, so the renames below are atomic.
    beside = folder if folder.is_dir() else folder.parent
    beside.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".rendering-", dir=beside))
    try:
        for relative, text in files.items():
            staged = staging / relative
            staged.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text(text, encoding="utf-8", newline="\n")
            staged.chmod(0o755 if text.startswith("#!") else 0o644)
        if not folder.exists():
            staging.chmod(0o755)
            os.replace(staging, folder)
            return list(targets.values())
        _move_into(staging, targets)
        return list(targets.values())
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move_into(staging: Path, targets: Mapping[str, Path]) -> None:
    """Rename staged files into an existing folder, keeping what they replace until the last one is in place."""
    kept = staging / ".replaced"
    done: list[tuple[Path, Path | None]] = []
    try:
        for index, (relative, target) in enumerate(targets.items()):
            target.parent.mkdir(parents=True, exist_ok=True)
            backup: Path | None = None
            if target.exists() or target.is_symlink():
                backup = kept / str(index)
                kept.mkdir(exist_ok=True)
                os.replace(target, backup)
                done.append((target, backup))
                os.replace(staging / relative, target)
            else:
                os.replace(staging / relative, target)
                done.append((target, None))
    except OSError:
        for target, backup in reversed(done):
            if backup is None:
                target.unlink(missing_ok=True)
            else:
                os.replace(backup, target)
        raise
