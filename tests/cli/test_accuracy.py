"""``planner accuracy``: the public records without arguments, files of one's own, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy_records import record, record_file
from tests.cli.conftest import Cli


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three good records, one of an unknown GPU, and three lines that cannot be used."""
    return record_file(
        tmp_path / "runs.jsonl",
        [
            record("a", measured__peak_mem_gib=30.0),
            "nonsense",
            record("a"),
            record("b", run__tp=4, run__dp=4),
            record("c", hardware__gpu="h1000"),
            record("d", run__tp=3),
            record("e", model__layers="32"),
            record("f", measured__oom=True, measured__step_time_s=None),
        ],
    )


def test_public_records(cli: Cli) -> None:
    """Without arguments: the table of the public records."""
    result = cli("accuracy")
    assert result.code == 0, result.err
    assert "public records" in result.out
    for text in ("megatron dense 16-bit", "aleph alpha", "Peak memory", "Does it fit", "grids", "planner calibrate"):
        assert text in result.out
    assert result.out.isascii()


def test_own_records(cli: Cli, runs: Path) -> None:
    """Every line that cannot be used and every record that cannot be priced is named, and the rest is compared."""
    result = cli("accuracy", "--records", str(runs))
    assert result.code == 0, result.err
    assert "5 runs read, 3 predicted" in result.out
    assert "Not readable: 3" in result.out
    for text in ("runs.jsonl:2: the line is not JSON", "this id was read before", "model.layers", "hint:"):
        assert text in result.out
    assert "c: unknown GPU 'h1000'" in result.out
    assert "d: tp * pp * cp does not divide the GPUs" in result.out


def test_json_and_predictions(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """The document and one line a record; the same bytes every time."""
    out = tmp_path / "predictions.jsonl"
    result = cli("accuracy", "--records", str(runs), "--predictions", str(out), "--json", "--by", "source")
    assert result.code == 0
    document = result.document
    assert (document["read"], document["priced"], document["by"]) == (5, 3, "source")
    assert [problem["line"] for problem in document["problems"]] == [2, 3, 7]
    assert {row["id"]: row["line"] for row in document["not_priced"]} == {"c": 5, "d": 6}
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == ["a", "b", "c", "d", "f"]
    figures = ("step_time_s", "step_time_range_s", "peak_memory_bytes", "peak_memory_range_bytes", "fits")
    assert all(set(line) == {"id", *figures, "skipped"} for line in lines)
    low, high = lines[0]["step_time_range_s"]
    assert low < lines[0]["step_time_s"] < high
    assert [line["skipped"] is None for line in lines] == [True, True, False, False, True]
    first = out.read_bytes()
    again = cli("accuracy", "--records", str(runs), "--predictions", str(out), "--force", "--json", "--by", "source")
    assert again.out == result.out
    assert out.read_bytes() == first


def test_several_files(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """Files add up; an empty one is a problem, not an error."""
    empty = record_file(tmp_path / "empty.jsonl", [])
    more = record_file(tmp_path / "more.jsonl", [record("z")])
    result = cli("accuracy", "--records", str(empty), "--records", str(runs), "--records", str(more), "--json")
    assert result.code == 0
    assert result.document["read"] == 6
    assert result.document["problems"][0]["what"] == "the file holds no records"


def test_nothing_readable(cli: Cli, tmp_path: Path) -> None:
    """Files without a single record end in exit code 2, with the problems shown."""
    result = cli("accuracy", "--records", str(record_file(tmp_path / "bad.jsonl", ["nonsense"])))
    assert result.code == 2
    assert "the line is not JSON" in result.out


def test_plot(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """An SVG or a PNG, written whole."""
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        result = cli("accuracy", "--records", str(runs), "--plot", str(tmp_path / name))
        assert result.code == 0, result.err
        assert name in result.out
        assert (tmp_path / name).read_bytes().startswith(start)


def test_plot_without_matplotlib(cli: Cli, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 6 and the extra to install."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = cli("accuracy", "--records", str(runs), "--plot", str(tmp_path / "a.svg"))
    assert result.code == 6
    assert "pip install 'parallel-planner[plot]'" in result.err
    assert not (tmp_path / "a.svg").exists()


def test_matplotlib_that_cannot_be_imported(
    cli: Cli, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken installation is named like a missing one."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = cli("accuracy", "--records", str(runs), "--plot", str(tmp_path / "a.svg"))
    assert result.code == 6
    assert "matplotlib.figure" in result.err


def test_names_of_a_file_cannot_write_to_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """Control sequences in names are shown escaped and long names are cut; the JSON has them as they are."""
    name = "\x1b[31mred" + "x" * 180  # a model may have 200 characters
    path = record_file(
        tmp_path / "odd.jsonl",
        [record(f"{name}/{index}", model__name=name, run__framework=name, hardware__gpu="h100") for index in range(10)]
        + [record("other/1", hardware__gpu=name)],
    )
    for by in ("source", "framework", "gpu", "class"):
        result = cli("accuracy", "--records", str(path), "--by", by)
        assert result.code == 0, result.err
        assert "\x1b" not in result.out
        assert "x" * 150 not in result.out.replace("\n", "").replace(" ", "")
    (sweep,) = cli("accuracy", "--records", str(path), "--json").document["sweeps"]
    assert sweep["model"] == name


def test_link(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """Writing to a link replaces the file behind it and leaves the link."""
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    assert cli("accuracy", "--records", str(runs), "--predictions", str(link)).code == 2
    assert cli("accuracy", "--records", str(runs), "--predictions", str(link), "--force").code == 0
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8").startswith('{"id": "a"')


def test_folder_without_write_permission(cli: Cli, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is read."""
    monkeypatch.setattr("planner.service.outputs.os.access", lambda *_: False)
    result = cli("accuracy", "--records", str(tmp_path / "nowhere"), "--predictions", str(tmp_path / "a.jsonl"))
    assert result.code == 2
    assert "cannot be written to" in result.err


REFUSED = {
    "predictions onto the records": ["--predictions", "runs.jsonl", "--force"],
    "plot onto the records": ["--records", "runs.svg", "--plot", "runs.svg", "--force"],
    "two outputs in one file": ["--predictions", "a.svg", "--plot", "./a.svg"],
    "predictions onto the profile": ["--profile", "a.yaml", "--predictions", "a.yaml", "--force"],
    "unknown grouping": ["--by", "clas"],
    "missing file": ["--records", "nowhere.jsonl"],
    "folder": ["--records", "."],
    "plot format": ["--plot", "a.pdf"],
    "plot folder": ["--plot", "nowhere/a.svg"],
    "predictions folder": ["--predictions", "nowhere/a.jsonl"],
    "predictions onto a folder": ["--predictions", ".", "--force"],
    "predictions onto a device": ["--predictions", "/dev/null", "--force"],
    "predictions NUL": ["--predictions", "a\0b"],
    "existing file": ["--predictions", "runs.jsonl"],
    "missing profile": ["--profile", "nowhere.yaml"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 with a hint; nothing is written."""
    monkeypatch.chdir(runs.parent)
    before = runs.read_bytes()
    result = cli("accuracy", *([] if "--records" in REFUSED[name] else ["--records", "runs.jsonl"]), *REFUSED[name])
    assert result.code == 2
    assert "hint:" in result.err
    assert [path.name for path in runs.parent.iterdir()] == ["runs.jsonl"]
    assert runs.read_bytes() == before
