"""Record files: every line that cannot be used is one problem with its place, and reading goes on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.accuracy.runs.records import DATA, MAX_LINE_BYTES, public_records, read_records
from planner.errors import InputError
from tests.accuracy_records import record, record_file

BAD_LINES = {
    "not JSON": ("{", "not JSON"),
    "NaN": (json.dumps(record("x", measured__step_time_s=float("nan"))), "NaN"),
    "infinite": (json.dumps(record("x")).replace("3.0", "1e999"), "finite"),
    "null": ("null", "not a record"),
    "list": ("[1]", "not a record"),
    "deep": ("[" * 100_000, "not JSON"),
    "huge digits": ('{"id": ' + "9" * 5000 + "}", "not JSON"),
    "empty object": ("{}", "id, model, hardware, run: these fields are missing"),
    "no model": (json.dumps(record("x", model=None)), "model: this must hold named values"),
    "number in quotes": (json.dumps(record("x", model__layers="32")), "model.layers: input should be a valid integer"),
    "no layers": (json.dumps(record("x", model__layers=0)), "model.layers: input should be greater than 0"),
    "too many layers": (json.dumps(record("x", model__layers=10**9)), "model.layers"),
    "negative time": (json.dumps(record("x", measured__step_time_s=-1.0)), "measured.step_time_s"),
    "flag in words": (json.dumps(record("x", measured__oom="yes")), "measured.oom"),
    "empty id": (json.dumps(record("")), "id: string should have at least 1 character"),
    "long line": ("x" * (MAX_LINE_BYTES + 10), "the line is too long"),
}


@pytest.mark.parametrize(("layers", "allowed"), [(0, "greater than 0"), (10**9, "less than or equal to 10000")])
def test_allowed_size(layers: int, allowed: str, tmp_path: Path) -> None:
    """What is allowed is said of sizes, too."""
    (problem,) = read_records([record_file(tmp_path / "a.jsonl", [record("x", model__layers=layers)])]).problems
    assert problem.allowed == allowed


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line(name: str, tmp_path: Path) -> None:
    """The line is named with file and number, and the records around it are read."""
    line, what = BAD_LINES[name]
    path = record_file(tmp_path / "runs.jsonl", [record("first"), line, "", record("last")])
    records = read_records([path])
    assert [run.id for run in records.runs] == ["first", "last"]
    (problem,) = records.problems
    assert (problem.file, problem.line) == (str(path), 2)
    assert what in problem.what
    assert problem.hint


def test_not_text(tmp_path: Path) -> None:
    """A line that is not UTF-8 leaves the next one alone; a byte order mark is no problem."""
    path = tmp_path / "runs.jsonl"
    good = json.dumps(record("good")).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n\xff\xfe\n" + good.replace(b'"good"', b'"better"'))
    records = read_records([path])
    assert [run.id for run in records.runs] == ["good", "better"]
    assert [problem.what for problem in records.problems] == ["the line is not UTF-8 text"]


def test_duplicates(tmp_path: Path) -> None:
    """Of records with one id the first counts, over all files."""
    one = record_file(tmp_path / "one.jsonl", [record("a"), record("a", run__tp=4)])
    two = record_file(tmp_path / "two.jsonl", [record("a"), record("b")])
    records = read_records([one, two])
    assert [run.id for run in records.runs] == ["a", "b"]
    assert records.runs[0].run.tp == 2
    assert [(Path(problem.file).name, problem.line) for problem in records.problems] == [
        ("one.jsonl", 2),
        ("two.jsonl", 1),
    ]
    assert "one.jsonl line 1" in records.problems[0].what


def test_empty_file(tmp_path: Path) -> None:
    """A file without records is a problem of the file, not an error."""
    empty = record_file(tmp_path / "empty.jsonl", ["", "  "])
    (problem,) = read_records([empty]).problems
    assert (problem.line, problem.what) == (None, "the file holds no records")


def test_archives(tmp_path: Path) -> None:
    """Archives are read; a damaged one gives what stands before the damage."""
    content = "".join(json.dumps(record(f"run {index}")) + "\n" for index in range(200)).encode()
    whole, cut, fake = (tmp_path / f"{name}.jsonl.gz" for name in ("whole", "cut", "fake"))
    whole.write_bytes(gzip.compress(content))
    assert len(read_records([whole]).runs) == 200
    cut.write_bytes(gzip.compress(content)[:-40])
    assert "cannot be read on" in read_records([cut]).problems[-1].what
    fake.write_bytes(content)
    records = read_records([fake])
    assert records.runs == []
    assert "not gzip" in (records.problems[0].hint or "")


@pytest.mark.parametrize("name", ["nowhere.jsonl", ".", "a\0b"])
def test_missing_file(name: str, tmp_path: Path) -> None:
    """A file that is not there is an error before anything is read."""
    with pytest.raises(InputError) as problem:
        read_records([tmp_path / name])
    assert problem.value.where == "--records"
    assert problem.value.hint


def test_public_records() -> None:
    """The records of the wheel are whole: every line is usable, has a source, and no id occurs twice."""
    records = public_records()
    assert records.problems == []
    assert len(records.runs) > 3_000
    assert all(run.source.title or run.source.repo for run in records.runs)
    assert all(Path(place.file).parent == DATA for place in records.places.values())
