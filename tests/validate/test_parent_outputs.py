"""Reports as files and runs as records: all or nothing, never over something, and readable by the other commands."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from planner.accuracy.predict import cases_of, predict
from planner.accuracy.runs.records import read_records
from planner.errors import InputError, MissingExtraError
from planner.specs.validation import GradientCheck, RankFailure, ValidationReport
from planner_validate.reports import records, report
from planner_validate.reports.comparison import report as compared
from planner_validate.runs.options import Options
from planner_validate.runs.plans import prepared
from tests.validate.runs import LAYOUTS, as_predicted, found_for


def made(layout: str = "sharded", *, slower: float = 1.0) -> ValidationReport:
    found = found_for(layout)
    return compared(found, as_predicted(found, slower=slower))


def test_files_of_a_report(tmp_path: Path) -> None:
    """JSON with the errors, Markdown with verdict and table, and a picture."""
    pytest.importorskip("matplotlib", reason="the picture needs it")
    written, missing = report.write(made(slower=3.0), f"{tmp_path}/run", force=False)
    assert sorted(path.name for path in written) == ["run.json", "run.md", "run.svg"]
    assert missing == ""
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["step_time"]["error"] == pytest.approx(1 / 3 - 1)
    assert document["step_time"]["within"] is False
    text = (tmp_path / "run.md").read_text()
    assert "OUTSIDE" in text
    assert "| forward and backward |" in text
    assert "run.svg" in text
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run", "run.json"),
        ("run.json", "run.json"),
        ("run.md", "run.json"),
        ("a.b", "a.b.json"),
        ("new/", "new/report.json"),
        ("there", "there/report.json"),
    ],
)
def test_folder_or_prefix(tmp_path: Path, name: str, expected: str) -> None:
    """An existing folder and a name with a slash are folders, everything else is a prefix."""
    (tmp_path / "there").mkdir()
    folder, stem = report.places(f"{tmp_path}/{name}")
    assert folder / f"{stem}.json" == tmp_path / expected


def test_existing_files_stay(tmp_path: Path) -> None:
    """Nothing is replaced unasked: said before the run and again when writing."""
    (tmp_path / "run.md").write_text("mine")
    with pytest.raises(InputError, match=r"run\.md"):
        report.check_out(f"{tmp_path}/run", force=False)
    with pytest.raises(InputError, match="exist already"):
        report.write(made(), f"{tmp_path}/run", force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run.md"]
    report.check_out(f"{tmp_path}/run", force=True)
    report.write(made(), f"{tmp_path}/run", force=True)
    assert (tmp_path / "run.md").read_text() != "mine"


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "/proc/self/status"])
def test_places_that_cannot_be_written(place: str) -> None:
    with pytest.raises(InputError, match="--out"):
        report.check_out(place, force=False)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing extra costs the picture and nothing else."""

    def refuse() -> None:
        raise MissingExtraError("plots need matplotlib", got="none")

    monkeypatch.setattr(report, "check_available", refuse)
    written, missing = report.write(made(), f"{tmp_path}/run", force=False)
    assert sorted(path.suffix for path in written) == [".json", ".md"]
    assert "pip install" in missing
    assert "svg" not in (tmp_path / "run.md").read_text()


FULL_DISK = """
import resource, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from planner.errors import InputError
from planner_validate.reports import records, report
from tests.validate.test_parent_outputs import made
found = made()
place, room = Path({place!r}), {room}
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    {call}
except InputError as problem:
    print(problem.exit_code, problem.message)
"""


def on_a_full_disk(call: str, place: Path, room: int) -> str:
    """What the call says where no file may grow beyond ``room`` bytes."""
    code = FULL_DISK.format(paths=[path for path in sys.path if path], place=str(place), room=room, call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_leaves_no_half_report(tmp_path: Path) -> None:
    told = on_a_full_disk("report.write(found, str(place), force=False)", tmp_path / "run", 2000)
    assert told.startswith("2 the files could not be written")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_records(tmp_path: Path) -> None:
    """A line that does not fit is taken back whole."""
    path = tmp_path / "runs.jsonl"
    records.append(made(), path)
    before = path.read_bytes()
    told = on_a_full_disk("records.append(found, place)", path, len(before) + 100)
    assert told.startswith("2 the record could not be added")
    assert path.read_bytes() == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != len(before) + 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_are_priced_like_the_plan(layout: str, tmp_path: Path) -> None:
    """Read back, a record is the same question: the prediction for it is the estimate of the plan."""
    found = found_for(layout)
    path = tmp_path / "runs.jsonl"
    assert records.append(made(layout), path)
    read = read_records([path])
    assert read.problems == []
    cases, skipped = cases_of(read.runs)
    assert skipped == []
    (prediction,) = predict(cases)
    assert prediction.step_time_s == pytest.approx(found.estimate.step_time_s, rel=1e-6)
    peak = made(layout).peak_memory
    assert peak is not None
    assert prediction.peak_memory_bytes == pytest.approx(peak.predicted, rel=1e-3)
    assert prediction.assumed == ()


def test_records_are_appended(tmp_path: Path) -> None:
    """To the lines that are there, also where the last one has no end."""
    path = tmp_path / "runs.jsonl"
    records.append(made(), path)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    records.append(made("tensor"), path)
    assert [run.run.tp for run in read_records([path]).runs] == [1, 2]


def test_a_failed_run_is_no_record(tmp_path: Path) -> None:
    found = found_for()
    failed = compared(found, as_predicted(found)[:2], [RankFailure(rank=3, kind="killed", phase="start", message="x")])
    assert not records.append(failed, tmp_path / "runs.jsonl")
    assert not (tmp_path / "runs.jsonl").exists()


@pytest.mark.parametrize("name", ["/proc/x.jsonl", "missing/x.jsonl", "x.jsonl.gz", "."])
def test_record_files_that_cannot_be_added_to(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--record"):
        records.check_record(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", '{\n  "schema_version": 1\n}\n'),
        ("notes.txt", ""),
        ("new.json", None),
        ("odd.jsonl", "not a record\n"),
        ("list.jsonl", "[1]\n"),
        ("plan.jsonl", '{\n  "schema_version": 1\n}\n'),
    ],
)
def test_records_are_not_added_to_other_files(name: str, text: str | None, tmp_path: Path) -> None:
    """The plan itself above all: a line behind it makes it unreadable."""
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match="--record"):
        records.check_record(path)


@pytest.mark.parametrize("name", ["new.jsonl", "empty.jsonl", "runs.jsonl"])
def test_record_files_that_can_be_added_to(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    records.append(made(), tmp_path / "runs.jsonl")
    records.check_record(tmp_path / name)


@pytest.mark.parametrize("force", [False, True])
def test_the_report_never_replaces_its_plan(force: bool, tmp_path: Path) -> None:
    """Also not where other files may be replaced, and also through a link."""
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    (tmp_path / "link.json").symlink_to(plan)
    for prefix in ("plan", "plan.json", "link"):
        with pytest.raises(InputError, match="the plan itself"):
            report.check_out(f"{tmp_path}/{prefix}", force=force, plan=plan)
    report.check_out(f"{tmp_path}/report", force=force, plan=plan)


def test_an_empty_place_is_not_this_folder() -> None:
    """An unset variable of a shell is no wish to write here."""
    with pytest.raises(InputError, match="no place is named"):
        report.check_out("", force=False)


def as_if(found: ValidationReport, **update: object) -> ValidationReport:
    return found.model_copy(update=update)


def test_the_next_step_can_be_taken() -> None:
    """Nothing is calibrated for a gap that no rate explains, and no record is offered where there can be none."""
    right, slow = made(), made(slower=3.0)
    assert "--record" in report.next_step(right)
    assert f"--gpu cpu --nproc {slow.request.cluster.gpus} --out" in report.next_step(slow)
    for mode in ("proxy", "memory-only"):
        told = report.next_step(as_if(right, mode=mode))
        assert records.record_of(as_if(right, mode=mode)) is None
        assert "--record" not in told
        assert "whole plan" in told
    too_full = as_if(right, verdict="outside")
    assert "first suspect" in report.next_step(too_full)
    assert "--on-this-machine" not in report.next_step(too_full)
    assert "calibrate" not in report.next_step(as_if(slow, mode="memory-only"))
    checked = GradientCheck(parameters=1, largest_relative_error=1.0, gradient_norm=1.0, reference_norm=2.0)
    wrong = as_if(slow, gradients=checked, verdict="failed")
    assert "first suspect" in report.next_step(wrong)
    assert "failure" not in report.next_step(wrong)


def test_the_runners_own_plans_have_no_other_framework() -> None:
    """PyTorch alone is no framework that --with-framework could start."""
    document = found_for().document
    job = document.request.job.model_copy(update={"precision": "fp8"})
    strategy = document.best.strategy.model_copy(update={"precision": "fp8"})
    refused = document.model_copy(
        update={
            "request": document.request.model_copy(update={"job": job}),
            "best": document.best.model_copy(update={"strategy": strategy}),
        }
    )
    with pytest.raises(InputError, match="precision") as caught:
        prepared(refused, Options())
    assert "--backend pytorch" in (caught.value.hint or "")
    assert "--with-framework" not in (caught.value.hint or "")
