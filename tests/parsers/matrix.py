"""The table at the end of a run of parsers: how many rendered plans each real parser read and refused, how many broken
files both sides refused, and how many the framework takes silently and only our side refuses.

Rows travel as properties of test reports, so the table is whole when tests run in several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict

PROPERTY = "parsers"


class Row(BaseModel):
    """Counts of one test."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    """The backend, or the launcher."""
    parser: str
    """Name and version of what read the files."""
    plans: int = 0
    refused: int = 0
    """Of the plans."""
    ranks: int = 0
    """Ranks whose parameters were counted by the framework itself and equal ours."""
    broken: int = 0
    """Files that were broken on purpose."""
    both: int = 0
    """Of the broken: refused by the framework and by us."""
    ours: int = 0
    """Of the broken: taken by the framework without a word, refused or named by us."""


NUMBERS = ("plans", "refused", "ranks", "broken", "both", "ours")
HEADS = ("plans", "refused", "ranks equal", "broken", "refused by both", "by ours alone")


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of the table, rows of the same target and parser summed; none without rows."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        total = sums.setdefault((row.target, row.parser), [0] * len(NUMBERS))
        for index, name in enumerate(NUMBERS):
            total[index] += getattr(row, name)
    if not sums:
        return
    target, parser = (max(len(key[i]) for key in sums) for i in (0, 1))
    yield f"{'target':{target}}  {'read by':{parser}}  " + "  ".join(HEADS)
    for (name, read_by), numbers in sorted(sums.items()):
        cells = (f"{number:>{len(head)}}" for number, head in zip(numbers, HEADS, strict=True))
        yield f"{name:{target}}  {read_by:{parser}}  " + "  ".join(cells)
