"""Files that a browser gets: the vendored ones unchanged and licensed, ours small."""

from __future__ import annotations

import hashlib
import re

import pytest

from planner.report.html import static_dir

ROW = re.compile(r"^\| (\S+\.js) \| (\S+) \| ([\d.]+) \| \S+ \| (\w+), (\S+) \| ([0-9a-f]{64}) \|$", re.MULTILINE)
VENDORED = ROW.findall((static_dir() / "VENDORED.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "package", "version", "licence", "text", "checksum"), VENDORED)
def test_vendored_files(file: str, package: str, version: str, licence: str, text: str, checksum: str) -> None:
    """The file is the stated one, says its version where it has a banner, and its licence lies beside it."""
    content = (static_dir() / file).read_bytes()
    assert hashlib.sha256(content).hexdigest() == checksum
    assert f"{package.split('/')[-1]}" in content[:200].decode() or version in content.decode()
    assert licence == "ISC"
    assert "Permission to use, copy, modify" in (static_dir() / text).read_text(encoding="utf-8")


def test_every_file_is_ours_or_listed() -> None:
    """A file that somebody adds is either known here or has a row in VENDORED.md."""
    listed = {name for row in VENDORED for name in (row[0], row[4])}
    assert len(VENDORED) == 2
    found = {path.name for path in static_dir().iterdir() if path.is_file()}
    assert found == listed | {"VENDORED.md", "charts.js", "plan.css"}
