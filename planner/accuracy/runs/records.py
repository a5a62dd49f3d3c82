"""Reads measured-run records: files of users, and the public records that come with the planner.

A line that cannot be used becomes one problem (file, line, what, got, allowed, hint) and reading goes on; only a file
that is not there or cannot be opened is an error."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from pydantic import ValidationError

from planner.errors import InputError
from planner.specs.accuracy import RecordProblem
from planner.specs.measurement import MeasuredRun
from planner.specs.problems import input_error, shown, unreadable

MAX_LINE_BYTES = 1_000_000
"""A record is about 2 kB; anything longer is not one."""
DATA = Path(__file__).parents[1] / "data"
"""The public records, one compressed file a collection."""
PUBLIC = "public records"
_FORMAT = "docs/accuracy.md describes a record"


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    file: str
    line: int


@dataclass
class Records:
    """What was read, and what could not be."""

    runs: list[MeasuredRun] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    """By id."""
    problems: list[RecordProblem] = field(default_factory=list)


def public_records() -> Records:
    """The records that the published error rests on."""
    return read_records(sorted(DATA.glob("*.jsonl.gz")))


def public_runs() -> list[MeasuredRun]:
    """The runs of the public records."""
    return public_records().runs


def read_records(paths: Iterable[Path], where: str = "--records") -> Records:
    """Records of several files (``.jsonl`` or ``.jsonl.gz``); of records with one id the first counts."""
    records = Records()
    for path in paths:
        _read(path, records, where)
    return records


def parse_records(lines: Iterable[str], place: str = "record") -> Records:
    """Records given as data, one JSON object a line; ``place`` names them in problems."""
    records = Records()
    for number, line in enumerate(lines, start=1):
        _take(line.encode(), Place(place, number), records)
    return records


def _read(path: Path, records: Records, where: str) -> None:
    before = len(records.runs) + len(records.problems)
    with closing(_opened(path, where)) as stream:
        for number, line in _lines(stream, path, records):
            if line.strip():
                _take(line, Place(str(path), number), records)
    if len(records.runs) + len(records.problems) == before:
        records.problems.append(
            RecordProblem(
                file=str(path), what="the file holds no records", allowed="one JSON object a line", hint=_FORMAT
            )
        )


def _opened(path: Path, where: str) -> IO[bytes]:
    try:
        if not path.is_file():
            what = "this is not a file" if path.exists() else "there is no such file"
            raise InputError(
                what, where=where, got=shown(str(path)), allowed="a .jsonl or .jsonl.gz file", hint="check the path"
            )
        # Closed by the caller.
        opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115
    except (OSError, ValueError) as problem:
        raise unreadable(problem, where, path) from problem
    return cast(IO[bytes], opened)


def _lines(stream: IO[bytes], path: Path, records: Records) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; one that is too long is passed over in pieces, a damaged archive ends the file."""
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) <= MAX_LINE_BYTES:
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                continue
            records.problems.append(
                RecordProblem(
                    file=str(path),
                    line=number,
                    what="the line is too long",
                    got=f"more than {MAX_LINE_BYTES} bytes",
                    allowed=f"at most {MAX_LINE_BYTES} bytes",
                    hint="a record is one JSON object on one line; this is probably not a record file",
                )
            )
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
    except (OSError, EOFError, zlib.error) as problem:
        records.problems.append(
            RecordProblem(
                file=str(path),
                line=number + 1,
                what=f"the file cannot be read on: {problem}"[:300],
                hint="the archive is damaged, or it is not gzip; the lines before were taken",
            )
        )


def _take(line: bytes, place: Place, records: Records) -> None:
    """One line into the records, or its first problem."""
    try:
        run = _parsed(line)
    except InputError as problem:
        records.problems.append(
            RecordProblem(
                file=place.file,
                line=place.line,
                what=f"{problem.where}: {problem.message}" if problem.where else problem.message,
                got=problem.got,
                allowed=problem.allowed,
                hint=problem.hint,
            )
        )
        return
    first = records.places.setdefault(run.id, place)
    if first is not place:
        records.problems.append(
            RecordProblem(
                file=place.file,
                line=place.line,
                what=f"this id was read before, in {first.file} line {first.line}",
                got=shown(run.id),
                allowed="every id once",
                hint="the first record counts; give this one an id of its own",
            )
        )
        return
    records.runs.append(run)


def _parsed(line: bytes) -> MeasuredRun:
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        raise InputError(
            "the line is not UTF-8 text",
            got=f"byte 0x{line[problem.start]:02x} at offset {problem.start}",
            allowed="UTF-8",
            hint="save the file as UTF-8",
        ) from problem
    try:
        content: Any = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise InputError(
            f"the line is not JSON: {problem}"[:200],
            got=shown(text.strip()),
            allowed="one JSON object a line",
            hint=_FORMAT,
        ) from problem
    if not isinstance(content, dict):
        raise InputError("the line is not a record", got=shown(content), allowed="one JSON object a line", hint=_FORMAT)
    try:
        # Strict: a number in quotes is a mistake of the file, not a number.
        return MeasuredRun.model_validate(content, strict=True)
    except ValidationError as problem:
        raise input_error(problem, "") from problem


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def names(paths: Sequence[Path]) -> str:
    """The files in words; none means the public records."""
    return ", ".join(path.name for path in paths) or PUBLIC
