"""Writing is all or nothing: existing files, bad folders and failures in the middle leave things as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.render import write_files

FILES = {"a.txt": "one\n", "sub/b.sh": "#!/bin/sh\n"}


def listing(folder: Path) -> dict[str, str]:
    """Every file below a folder with its text."""
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_new_folder_and_its_parents_are_made(tmp_path: Path) -> None:
    """Missing parents are created and nothing else is left beside the files."""
    paths = write_files(tmp_path / "x" / "y", FILES)
    assert listing(tmp_path) == {"x/y/a.txt": "one\n", "x/y/sub/b.sh": "#!/bin/sh\n"}
    assert all(path.is_file() for path in paths)


def test_existing_files_are_refused_by_name(tmp_path: Path) -> None:
    """Without force nothing is touched and the error names the files."""
    (tmp_path / "a.txt").write_text("mine\n")
    with pytest.raises(InputError, match=r"a\.txt") as caught:
        write_files(tmp_path, FILES)
    assert "--force" in str(caught.value)
    assert listing(tmp_path) == {"a.txt": "mine\n"}


def test_force_overwrites_and_keeps_other_files(tmp_path: Path) -> None:
    """Force replaces what is rendered and leaves the rest of the folder alone."""
    (tmp_path / "a.txt").write_text("mine\n")
    (tmp_path / "other.txt").write_text("keep\n")
    write_files(tmp_path, FILES, force=True)
    assert listing(tmp_path) == {**FILES, "other.txt": "keep\n"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """The output folder, or a parent of it, may not be a file."""
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="is a file"):
            write_files(folder, FILES)


def test_a_folder_in_place_of_a_file_is_refused_even_with_force(tmp_path: Path) -> None:
    """Force never removes a folder."""
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(InputError, match="folder stands where a file"):
        write_files(tmp_path, FILES, force=True)


@pytest.mark.parametrize("path", ["../out.txt", "/etc/out.txt", ""])
def test_paths_must_stay_inside(path: str, tmp_path: Path) -> None:
    """Nothing is written outside the folder."""
    with pytest.raises(InputError, match="stay inside"):
        write_files(tmp_path / "out", {path: "x"})
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failure_in_the_middle_restores_everything(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rename fails, replaced files come back and new ones disappear."""
    (tmp_path / "a.txt").write_text("mine\n")
    real, calls = os.replace, iter(range(1, 100))

    def replace(source: Path, target: Path) -> None:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(InputError, match="No space left"):
        write_files(tmp_path, FILES, force=True)
    assert listing(tmp_path) == {"a.txt": "mine\n"}


def test_scripts_become_executable(tmp_path: Path) -> None:
    """A shebang makes a file executable."""
    write_files(tmp_path / "out", FILES)
    assert os.access(tmp_path / "out" / "sub" / "b.sh", os.X_OK)
    assert not os.access(tmp_path / "out" / "a.txt", os.X_OK)
