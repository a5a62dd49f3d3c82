"""check, diagnose and render --from on configurations: written by the planner, edited by hand, and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.render import RENDERED_BACKENDS
from tests.cli.conftest import Cli

MACHINES = ("--gpu", "h100", "--gpus", "128")


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    """The files of the best Megatron-LM plan of a 70B model on 128 H100."""
    out = tmp_path / "plan"
    assert cli("suggest", "--model", "llama-3-70b", *MACHINES, "--backend", "megatron", "--out", str(out)).code == 0
    return out


def edited(folder: Path, old: str, new: str) -> Path:
    """The folder with a change to the arguments."""
    path = folder / "megatron_args.sh"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def test_a_plan_is_found_sound(cli: Cli, folder: Path) -> None:
    """Exit code 0, the plan's own strategy and figures, nothing to improve but noise."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    result = cli("check", str(folder), *MACHINES, "--json")
    assert result.code == 0
    assert result.document["legal"] is True
    assert result.document["fits"] is True
    assert result.document["findings"] == []
    assert result.document["plan"]["strategy"] == plan["best"]["strategy"]
    step = result.document["plan"]["estimate"]["step_time_s"]
    assert step == pytest.approx(plan["best"]["estimate"]["step_time_s"], rel=1e-6)
    assert result.document.get("improvements", []) == []
    printed = cli("check", str(folder), *MACHINES)
    assert "legal, fits" in printed.out


@pytest.mark.parametrize("backend", RENDERED_BACKENDS)
def test_written_files_say_the_whole_plan(cli: Cli, tmp_path: Path, backend: str) -> None:
    """Model and machines alone are given again: sequence length, batch and strategy stand in the files."""
    asked = ("--model", "llama-3-8b", "--gpu", "h100", "--gpus", "8")
    job = ("--seq-len", "2048", "--global-batch", "48")
    assert cli("suggest", *asked, *job, "--backend", backend, "--out", str(tmp_path / "plan")).code == 0
    best = json.loads((tmp_path / "plan" / "plan.json").read_text(encoding="utf-8"))["best"]
    result = cli("check", str(tmp_path / "plan"), *asked, "--no-advise", "--json")
    assert result.code == 0, result.out
    assert result.document["plan"]["strategy"] == best["strategy"]
    for figure in ("step_time_s", "peak_memory_bytes"):
        assert result.document["plan"]["estimate"][figure] == pytest.approx(best["estimate"][figure], rel=1e-6)


def test_everything_wrong_is_named_at_once(cli: Cli, folder: Path) -> None:
    """A layout that loses a layer and a batch that does not divide: both findings, exit code 3, no traceback."""
    edited(folder, "--global-batch-size 512", "--global-batch-size 510")
    edited(folder, "--micro-batch-size 1", "--micro-batch-size 3")
    result = cli("check", str(folder), *MACHINES, "--json")
    assert result.code == 3
    ids = {finding["id"] for finding in result.document["findings"] if finding["severity"] == "error"}
    assert "batch-divisible" in ids
    assert result.document["fits"] is None
    assert "NOT LEGAL" in cli("check", str(folder), *MACHINES).out


def test_memory_decides(cli: Cli, folder: Path) -> None:
    """Twice the micro-batch does not fit; what helps is named and fits."""
    edited(folder, "--micro-batch-size 1", "--micro-batch-size 2")
    result = cli("check", str(folder), *MACHINES, "--json")
    assert result.code == 3
    assert result.document["legal"] is True
    assert result.document["fits"] is False
    changes = result.document["improvements"]
    assert any("micro_batch 1 instead of 2" in change["change"][0] for change in changes)
    assert all(change["plan"]["estimate"]["fits"] for change in changes)


def test_recompute_that_is_not_needed(cli: Cli, folder: Path) -> None:
    """Full recomputation where none is needed costs a quarter of the step, and the check says so."""
    edited(
        folder,
        "--micro-batch-size 1",
        "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    )
    result = cli("check", str(folder), *MACHINES, "--json")
    assert result.code == 0
    findings = {finding["id"]: finding for finding in result.document["findings"]}
    assert findings["recompute-not-needed"]["severity"] == "warning"
    best = result.document["improvements"][0]
    assert best["step_time_change"] < -0.15


def test_without_machines_the_rest_is_still_said(cli: Cli, folder: Path) -> None:
    """No accelerator: findings of the file, and what to give for more."""
    files = [str(path) for path in folder.iterdir() if path.suffix == ".sh"]
    result = cli("check", *files, "--json")
    assert result.code == 0
    assert result.document["fits"] is None
    assert any("--gpu" in warning for warning in result.document["warnings"])


@pytest.mark.parametrize("content", ["", "hello world\n", '{"a": [1, 2}', "\x00\x01", "a: b: c: [", "[x]\ny = = 3"])
def test_files_that_are_no_configuration(cli: Cli, tmp_path: Path, content: str) -> None:
    """Exit code 2 with the known formats; never a traceback."""
    path = tmp_path / "thing.txt"
    path.write_text(content, encoding="utf-8")
    result = cli("check", str(path))
    assert result.code == 2
    assert "Traceback" not in result.err
    assert "error:" in result.err


def test_no_file_and_an_empty_folder(cli: Cli, tmp_path: Path) -> None:
    """Named with a hint."""
    assert cli("check", str(tmp_path / "missing")).code == 2
    empty = cli("check", str(tmp_path))
    assert empty.code == 2
    assert "hint:" in empty.err


def test_diagnosis(cli: Cli, folder: Path) -> None:
    """As expected; a figure of one GPU; a machine that is slower."""
    tokens = 512 * 8192 / json.loads((folder / "plan.json").read_text())["best"]["estimate"]["step_time_s"]

    def told(measured: float) -> dict[str, object]:
        result = cli("diagnose", str(folder), *MACHINES, "--measured-tokens-per-s", str(measured), "--json")
        assert result.code == 0
        return dict(result.document["diagnosis"])

    fine = told(tokens)
    assert fine["as_expected"] is True
    assert fine["causes"] == []
    one = told(tokens / 128)
    assert [cause["id"] for cause in one["causes"]] == ["figure-per-gpu"]  # type: ignore[attr-defined]
    slow = told(tokens / 2)
    assert slow["slowdown"] == pytest.approx(2.0, rel=1e-3)
    causes = [cause["id"] for cause in slow["causes"]]  # type: ignore[attr-defined]
    assert causes[0].startswith("slow-")
    printed = cli("diagnose", str(folder), *MACHINES, "--measured-tokens-per-s", str(tokens / 2)).out
    assert "2.0 times the expected time" in printed


def test_a_configuration_goes_to_another_framework(cli: Cli, tmp_path: Path) -> None:
    """DeepSpeed ZeRO-3 files become FSDP files of the same job; a pipeline is refused by rule, with a way out."""
    source, target = tmp_path / "ds", tmp_path / "fsdp"
    asked = ("--model", "llama-3-8b", "--gpu", "h100", "--gpus", "16", "--backend", "fsdp")
    assert cli("suggest", *asked, "--pin", "tp=1,cp=1", "--out", str(source)).code == 0
    machines = ("--model", "llama-3-8b", "--gpu", "h100", "--gpus", "16")
    done = cli("render", "--from", str(source), *machines, "--to", "deepspeed", "--out", str(target), "--json")
    assert done.code == 0, done.err
    assert (target / "ds_config.json").is_file()
    assert isinstance(done.document["lost"], list)


def test_what_is_not_carried_over_is_true(cli: Cli, tmp_path: Path) -> None:
    """Buckets that the target's files hold, too, are carried; learning rate and data never are, and that is said."""
    out = tmp_path / "ds"
    few = ("--gpu", "h100", "--gpus", "8")
    cli("suggest", "--model", "llama-3-8b", *few, "--backend", "deepspeed", "--out", str(out))
    given = ("--from", str(out), "--model", "llama-3-8b", *few)
    same = cli("render", *given, "--to", "accelerate-deepspeed")
    other = cli("render", *given, "--to", "megatron")
    assert (same.code, other.code) == (0, 0)
    assert "not carried over: zero_optimization" not in same.out + same.err
    assert "allgather_bucket_size" in other.out + other.err
    assert all("learning rate" in done.out + done.err for done in (same, other))


def test_files_of_one_name_are_two_files(cli: Cli, tmp_path: Path) -> None:
    """config.yaml of the launcher and config.yaml of the script, each in its folder."""
    texts = {
        "launcher": "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n",
        "script": "model_name_or_path: org/base\nper_device_train_batch_size: 3\noutput_dir: out\nmax_length: 2048\n",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text, encoding="utf-8")
    paths = [str(tmp_path / name / "config.yaml") for name in texts]
    for order in (paths, paths[::-1]):
        strategy = cli("check", *order, "--model", "llama-3-8b", "--gpu", "h200", "--json").document["plan"]["strategy"]
        assert (strategy["micro_batch"], strategy["zero_stage"]) == (3, 3)


def test_one_thing_to_render(cli: Cli, folder: Path) -> None:
    """A plan or files, not both, not neither."""
    assert cli("render").code == 2
    assert cli("render", str(folder / "plan.json"), "--from", str(folder)).code == 2


def test_a_written_folder_needs_no_options(cli: Cli, tmp_path: Path) -> None:
    """The plan.json in it says model, machines and sequence length; an edited file is still what is judged."""
    folder = tmp_path / "plan"
    asked = ("--model", "llama-3.1-8b", "--gpu", "h200", "--gpus", "16", "--backend", "deepspeed", "--seq-len", "4096")
    planned = cli("suggest", *asked, "--out", str(folder), "--json").document
    checked = cli("check", str(folder), "--no-advise", "--json")
    assert checked.code == 0
    assert checked.document["plan"]["strategy"] == planned["best"]["strategy"]
    assert checked.document["plan"]["estimate"]["step_time_s"] == planned["best"]["estimate"]["step_time_s"]
    assert {"model", "cluster"} <= {each["field"] for each in checked.document["assumptions"]}
    other = cli("check", str(folder), "--gpu", "a100", "--no-advise", "--json").document
    assert other["request"]["cluster"]["accelerator"]["id"].startswith("a100")
    assert other["request"]["model"]["name"] == "llama-3.1-8b"
    (folder / "plan.json").write_text("{}", encoding="utf-8")
    alone = cli("check", str(folder), "--no-advise", "--json").document
    assert "plan" not in alone
    assert any("plan.json was left aside" in warning for warning in alone["warnings"])
