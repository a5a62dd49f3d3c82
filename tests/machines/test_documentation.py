"""docs/machines.md names every finding, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = re.compile(r"\b(?:note|warning)\(\s*\"([a-z-]+)\"")
TABLE = re.compile(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", re.MULTILINE)


def test_every_finding_is_documented() -> None:
    """The first column of the table and the ids in the code are the same set."""
    service = (ROOT / "planner" / "service").glob("machine_*.py")
    files = [*(ROOT / "planner" / "machines").glob("*.py"), *service]
    made = {identifier for file in files for identifier in MADE.findall(file.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8").split("## Findings")[1]
    told = [identifier for row in TABLE.findall(page) for identifier in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(told) == sorted(made)
