"""``planner calibrate`` and ``--profile``: a profile is written, said, part of the plan, and refused where it does not
belong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.accuracy.comparison.report import scored
from tests.accuracy_records import measured_run, record, record_file
from tests.cli.conftest import SMALL_JOB, Cli

ESTIMATE = ("estimate", *SMALL_JOB, "--tp", "2")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One run that takes a quarter longer than predicted, with memory."""
    (row,) = scored([measured_run("a")])
    slow = 1.25 * (row.prediction.step_time_s or 0.0)
    return record_file(
        tmp_path / "runs.jsonl", [record("a", measured__step_time_s=slow, measured__peak_mem_gib=50.0), "nonsense"]
    )


@pytest.fixture
def profile(cli: Cli, runs: Path) -> Path:
    path = runs.with_name("profile.yaml")
    assert cli("calibrate", "--from-records", str(runs), "--out", str(path)).code == 0
    return path


def test_table(cli: Cli, runs: Path) -> None:
    """Factors, runs before and after, what is not fitted, the line that cannot be read, and the next command."""
    result = cli("calibrate", "--from-records", str(runs))
    assert result.code == 0, result.err
    for text in (
        "speed",
        "x 0.8",
        "-20.0 %",
        "Not fitted",
        "from 3 different",
        "Not readable: 1",
        "--out PROFILE.yaml",
        "megatron-lm on h100-sxm-80gb: 1 run\n",
    ):
        assert text in result.out


def test_next_command_can_be_copied(cli: Cli, runs: Path) -> None:
    """The profile's name is in it."""
    path = runs.with_name("mine.yaml")
    assert (
        f"planner suggest ... --profile {path}`"
        in cli("calibrate", "--from-records", str(runs), "--out", str(path)).out
    )


def test_names_of_a_file_cannot_write_to_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """Control sequences in frameworks and ids are shown escaped or left out."""
    odd = {"run__framework": "\x1b[31mred"}
    one = record_file(tmp_path / "one.jsonl", [record("\x1b[31ma", **odd)])
    two = record_file(tmp_path / "two.jsonl", [record("a", **odd), record("b")])
    three = record_file(tmp_path / "three.jsonl", [record("\x1b[31ma"), record("b", measured__step_time_s=9.0)])
    for path, code in ((one, 0), (two, 2), (three, 2)):
        result = cli("calibrate", "--from-records", str(path))
        assert result.code == code, result.err
        assert "\x1b" not in result.out + result.err


def test_json_and_file(cli: Cli, runs: Path, profile: Path) -> None:
    """The file holds the profile of the document, readable by people; it is not replaced unasked."""
    result = cli("calibrate", "--from-records", str(runs), "--json")
    assert result.code == 0
    content = yaml.safe_load(profile.read_text(encoding="utf-8"))
    assert content == result.document["profile"]
    assert content["accelerator"] == "h100-sxm-80gb"
    assert content["factors"]["gemm_share"] == pytest.approx(0.8, rel=0.02)
    again = cli("calibrate", "--from-records", str(runs), "--out", str(profile))
    assert again.code == 2
    assert "exists already" in again.err
    assert cli("calibrate", "--from-records", str(runs), "--out", str(profile), "--force").code == 0


def test_estimate(cli: Cli, profile: Path, tmp_path: Path) -> None:
    """Slower by the factor, said in the assumptions, in the request, and kept when the plan is estimated again."""
    plain = cli(*ESTIMATE, "--json").document
    result = cli(*ESTIMATE, "--profile", str(profile), "--json")
    assert result.code in (0, 3), result.err
    document = result.document
    slower = document["best"]["estimate"]["step_time_s"] / plain["best"]["estimate"]["step_time_s"]
    assert slower == pytest.approx(1.25, rel=0.02)
    assert document["id"] != plain["id"]
    assert "profile" not in plain["request"]
    assert document["request"]["profile"]["framework"] == "megatron-lm"
    assert any(item["field"] == "constants.factors" for item in document["assumptions"])
    path = tmp_path / "plan.json"
    path.write_text(result.out, encoding="utf-8")
    again = cli("estimate", str(path), "--json").document
    assert again["best"]["estimate"] == document["best"]["estimate"]
    path.write_text(result.out.replace('"accelerator": "h100-sxm-80gb"', '"accelerator": "a100-sxm-80gb"'), "utf-8")
    edited = cli("estimate", str(path))
    assert edited.code == 2
    assert "request.profile.accelerator = a100-sxm-80gb" in edited.err
    profile_of = document["request"]["profile"]
    for change, where in (
        ({"factors": {"warp_share": 2.0}}, "request.profile: factors"),
        ({"schema_version": 2}, "request.profile: schema_version"),
    ):
        request = document["request"] | {"profile": profile_of | change}
        path.write_text(json.dumps(document | {"request": request}), encoding="utf-8")
        for command in ("estimate", "render"):
            refused = cli(command, str(path))
            assert refused.code == 2
            assert where in refused.err


def test_edited_by_hand(cli: Cli, profile: Path) -> None:
    """What the answer says of the profile is what its factors do, not what was once fitted."""

    def said() -> tuple[str, str]:
        document = cli(*ESTIMATE, "--profile", str(profile), "--json").document
        (item,) = (item for item in document["assumptions"] if item["field"] == "constants.factors")
        return item["value"], item["why"]

    value, why = said()
    assert value.startswith("speed x 0.8")
    assert "from 1 run of megatron-lm" in why
    assert "edited" not in why
    content = yaml.safe_load(profile.read_text(encoding="utf-8"))
    content["factors"] = {"gemm_share": 0.5, "launch_s": 1.0}
    content["memory_factor"] = 1.0
    profile.write_text(yaml.safe_dump(content), encoding="utf-8")
    value, why = said()
    assert value == "gemm_share x 0.5"
    assert "edited by hand" in why


def test_suggest(cli: Cli, profile: Path) -> None:
    """The search prices every candidate with the profile and says so."""
    asked = ("suggest", *SMALL_JOB, "--backend", "fsdp")
    plain, result = cli(*asked, "--json").document, cli(*asked, "--profile", str(profile), "--json").document
    assert result["best"]["estimate"]["step_time_s"] > 1.15 * plain["best"]["estimate"]["step_time_s"]
    assert "machine profile" in cli(*asked, "--profile", str(profile)).out


def test_accuracy(cli: Cli, runs: Path, profile: Path) -> None:
    """The calibrated run is predicted well."""
    arguments = ("accuracy", "--records", str(runs), "--json")
    before = cli(*arguments).document["step_time"][0]["errors"]["median"]
    result = cli(*arguments, "--profile", str(profile)).document
    assert before == pytest.approx(0.2, abs=0.01)
    assert result["step_time"][0]["errors"]["median"] < 0.02
    assert result["profile"] == "megatron-lm on h100-sxm-80gb"
    assert result["profiled"] == 1
    assert (
        "1 of them with the profile of megatron-lm on h100-sxm-80gb"
        in cli(*arguments[:-1], "--profile", str(profile)).out
    )


def test_accuracy_on_another_accelerator(cli: Cli, profile: Path, tmp_path: Path) -> None:
    """That a profile counts for none of the runs is said."""
    path = record_file(tmp_path / "a100.jsonl", [record("a", hardware__gpu="a100")])
    result = cli("accuracy", "--records", str(path), "--profile", str(profile))
    assert result.code == 0
    assert "none of them with the profile" in result.out
    assert cli("accuracy", "--records", str(path), "--profile", str(profile), "--json").document["profiled"] == 0


def test_other_accelerator(cli: Cli, profile: Path) -> None:
    """A profile of another accelerator is refused."""
    result = cli(*ESTIMATE, "--gpu", "a100", "--profile", str(profile))
    assert result.code == 2
    assert "another accelerator" in result.err
    assert "h100-sxm-80gb" in result.err


BROKEN: dict[str, dict[str, Any]] = {
    "version": {"schema_version": 2},
    "unknown constant": {"factors": {"warp_share": 1.1}},
    "negative factor": {"factors": {"gemm_share": -1.0}},
    "factor in words": {"factors": {"gemm_share": "fast"}},
    "unknown field": {"colour": "blue"},
    "no accelerator": {"accelerator": None},
    "factor in quotes": {"factors": {"gemm_share": "0.8"}},
    "factor as a flag": {"factors": {"gemm_share": True}},
    "control sequence": {"framework": "\x1b[31mred"},
    "control sequence in a factor": {"factors": {"\x1b[31mred": 0.8}},
    "long name": {"framework": "x" * 5000},
    "nested field": {"fitted": [{"a": 1}]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_profile(name: str, cli: Cli, profile: Path) -> None:
    """A profile that was edited badly is named with its field."""
    content = yaml.safe_load(profile.read_text(encoding="utf-8")) | BROKEN[name]
    profile.write_text(yaml.safe_dump(content), encoding="utf-8")
    result = cli(*ESTIMATE, "--profile", str(profile))
    assert result.code == 2
    assert "profile.yaml" in result.err
    assert "hint:" in result.err
    assert "\x1b" not in result.err


REFUSED = {
    "no option": [],
    "missing file": ["--from-records", "nowhere.jsonl"],
    "out folder": ["--from-records", "runs.jsonl", "--out", "nowhere/p.yaml"],
    "out onto the records": ["--from-records", "runs.jsonl", "--out", "./runs.jsonl", "--force"],
    "nothing usable": ["--from-records", "empty.jsonl"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 with a hint, and no profile."""
    monkeypatch.chdir(runs.parent)
    record_file(runs.with_name("empty.jsonl"), [])
    before = runs.read_bytes()
    result = cli("calibrate", *REFUSED[name])
    assert result.code == 2
    assert runs.read_bytes() == before
    assert "hint:" in result.err
    assert not list(runs.parent.glob("*.yaml"))
