"""``--report``: the plan as a file for people, checked before the search, written whole, named in the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import service
from tests.cli.conftest import SMALL_JOB, Cli


@pytest.mark.parametrize(
    "command", [("suggest", *SMALL_JOB), ("estimate", *SMALL_JOB, "--tp", "8")], ids=lambda words: words[0]
)
def test_both_kinds_are_written(cli: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    """The option can be repeated; the output names the files."""
    page, text = tmp_path / "plan.html", tmp_path / "plan.md"
    result = cli(*command, "--report", str(page), "--report", str(text))
    assert result.code == 0, result.err
    assert str(page) in result.out.replace("\n", "")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert text.read_text(encoding="utf-8").startswith("## llama-3.1-8b on 16 x ")
    assert sorted(tmp_path.iterdir()) == [page, text]


def test_beside_the_launch_files(cli: Cli, tmp_path: Path) -> None:
    """A report may lie in the folder that --out makes, and never takes the place of one of its files."""
    out = tmp_path / "made"
    assert cli("suggest", *SMALL_JOB, "--out", str(out), "--report", str(out / "plan.html")).code == 0
    guide = (out / "README.md").read_text(encoding="utf-8")
    for folder in (out, tmp_path / "new"):
        report = folder / "README.md"
        result = cli("suggest", *SMALL_JOB, "--out", str(folder), "--report", str(report), "--force")
        assert result.code == 2
        assert "also what --out names" in result.err
    assert (out / "README.md").read_text(encoding="utf-8") == guide
    assert not (tmp_path / "new").exists()


def test_json_stays_json(cli: Cli, tmp_path: Path) -> None:
    """Beside a report, --json prints the document and nothing else."""
    result = cli("suggest", *SMALL_JOB, "--json", "--report", str(tmp_path / "plan.md"))
    assert result.document["best"]["backend"]
    assert (tmp_path / "plan.md").is_file()


def test_of_a_plan_file(cli: Cli, tmp_path: Path) -> None:
    """A plan.json is estimated again and reported; --report does not contradict the file."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(cli("suggest", *SMALL_JOB, "--json").document), encoding="utf-8")
    result = cli("estimate", str(plan), "--report", str(tmp_path / "again.md"))
    assert result.code == 0, result.err
    assert (tmp_path / "again.md").is_file()


def test_a_plan_that_does_not_fit_is_reported(cli: Cli, tmp_path: Path) -> None:
    """The report is written, and the exit code says what it always says."""
    file = tmp_path / "plan.md"
    result = cli("estimate", "--model", "llama-3.1-70b", "--gpus", "8", "--gpu", "h100", "--report", str(file))
    assert result.code == 3
    assert "Does not fit" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "html"])
def test_other_kinds_are_refused(cli: Cli, tmp_path: Path, name: str) -> None:
    """What kind of report it is, the name says."""
    result = cli("suggest", *SMALL_JOB, "--report", str(tmp_path / name))
    assert result.code == 2
    for said in ("--report", "allowed: .html or .md", "hint:"):
        assert said in result.err


@pytest.mark.parametrize("command", ["suggest", "estimate"])
def test_targets_are_checked_before_the_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A file that exists, a missing folder and a file named twice are refused at once; --force replaces."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("work was spent")

    file = tmp_path / "plan.md"
    file.write_text("mine", encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(service, command, never)
        for paths in ((file,), (tmp_path / "no" / "plan.md",), (tmp_path / "a.md", tmp_path / "a.md")):
            result = cli(command, *SMALL_JOB, *(word for path in paths for word in ("--report", str(path))))
            assert result.code == 2, result.err
            assert "--report" in result.err
    assert file.read_text(encoding="utf-8") == "mine"
    assert (
        cli(
            command, *SMALL_JOB, "--tp" if command == "estimate" else "--top", "8", "--report", str(file), "--force"
        ).code
        == 0
    )
    assert file.read_text(encoding="utf-8") != "mine"


def test_the_option_is_hinted_at(cli: Cli, tmp_path: Path) -> None:
    """A search names the option, until it is used."""
    assert "--report plan.html" in " ".join(cli("suggest", *SMALL_JOB).out.split())
    used = cli("suggest", *SMALL_JOB, "--report", str(tmp_path / "plan.md"))
    assert "--report plan.html" not in " ".join(used.out.split())
