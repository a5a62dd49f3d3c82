"""Packing public records: facts stay, prose and other people's predictions go, and the bytes are always the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.accuracy.runs import pack
from planner.accuracy.runs.records import DATA, read_records
from tests.accuracy_records import record, record_file

EXTRA = {
    "task": "sft",
    "kernel": None,
    "args": {"recompute-granularity": "full", "fp8-format": None},
    "simumax_predicted": {"step_ms": 1.0},
    "story": "word " * 100,
}


def test_what_is_kept() -> None:
    """Stated settings are kept; nulls, long texts, notes, predictions of other tools and unknown groups are not."""
    full = record("x", run__extra=EXTRA, run__vpp=None, measured__hfu=0.5, model__params_b=8.0)
    full |= {"notes": "told at length", "flops_convention": "6N"}
    full["measured"]["peak_mem_kind"] = "rank 0; see OTHER.md"
    packed = pack.packed(full)
    assert set(packed) == {"id", "source", "model", "hardware", "run", "measured"}
    assert packed["run"]["extra"] == {"task": "sft", "args": {"recompute-granularity": "full"}}
    assert "vpp" not in packed["run"]
    assert "hfu" not in packed["measured"]
    assert packed["measured"]["peak_mem_kind"] == "rank 0"
    assert packed["model"] == {key: value for key, value in record("x")["model"].items() if value is not None}


def test_archive_is_reproducible() -> None:
    """No time of day and no file name stand in the header."""
    archive = pack.archive([record("x")])
    assert archive == pack.archive([record("x")])
    assert archive[3] == 0
    assert archive[4:8] == bytes(4)
    assert json.loads(gzip.decompress(archive))["id"] == "x"


def test_packing_again_changes_nothing() -> None:
    """What the wheel holds is already packed."""
    for path in DATA.glob("*.jsonl.gz"):
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        assert [pack.packed(line) for line in lines] == lines


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of files becomes one archive a file; archives of other files go."""
    data = tmp_path / "data"
    monkeypatch.setattr(pack, "DATA", data)
    data.mkdir()
    (data / "old.jsonl.gz").write_bytes(b"")
    record_file(tmp_path / "lab.jsonl", [record("a"), record("b")])
    pack.main(tmp_path)
    assert [path.name for path in data.iterdir()] == ["lab.jsonl.gz"]
    assert [run.id for run in read_records([data / "lab.jsonl.gz"]).runs] == ["a", "b"]
    with pytest.raises(SystemExit, match=r"no \*.jsonl files"):
        pack.main(data)
