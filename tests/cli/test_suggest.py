"""``planner suggest``: the document, the table, files, limits, and what happens when nothing fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from planner.specs.plan import PlanDocument
from tests.cli.conftest import SMALL_JOB, Cli

BASE = ["suggest", *SMALL_JOB]


def test_document(cli: Cli) -> None:
    """The JSON is a valid plan document: best, ranked alternatives, one entry a framework, proof, assumptions."""
    result = cli(*BASE, "--top", "4", "--json")
    assert result.code == 0, result.out
    assert result.err == ""
    document = result.document
    jsonschema.validate(document, PlanDocument.model_json_schema())
    assert PlanDocument.model_validate_json(result.out).to_json_dict() == document
    assert list(document["by_backend"]) == ["megatron", "deepspeed", "fsdp"]
    assert document["search"]["status"] == "optimal"
    assert document["search"]["gap"] == 0
    assert document["search"]["candidates"] > 0
    assert document["best"]["why"]
    plans = [document["best"], *document["alternatives"]]
    assert len(plans) == 4
    times = [plan["estimate"]["step_time_s"] for plan in plans]
    assert times == sorted(times)
    assert document["best"] in document["by_backend"].values()
    for plan in [*plans, *filter(None, document["by_backend"].values())]:
        strategy = plan["strategy"]
        assert plan["estimate"]["fits"]
        assert strategy["tp"] * strategy["pp"] * strategy["cp"] * strategy["dp"] == 16
        assert sum(strategy["layers_per_stage"]) == 32


def test_same_question_same_answer(cli: Cli) -> None:
    """The id depends on the question alone, and the answer does not change from run to run."""
    first, second = (cli(*BASE, "--json").document for _ in range(2))
    for document in (first, second):
        document["search"].pop("seconds")
    assert first == second
    assert cli(*BASE, "--memory-margin", "0.1", "--json").document["id"] != first["id"]


def test_estimate_agrees_with_suggest(cli: Cli, tmp_path: Path) -> None:
    """Estimating the suggested plan gives the figures of the suggestion."""
    result = cli(*BASE, "--json")
    path = tmp_path / "plan.json"
    path.write_text(result.out, encoding="utf-8")
    again = cli("estimate", str(path), "--json")
    assert again.code == 0
    assert again.document["best"]["estimate"] == result.document["best"]["estimate"]


def test_human_output_fits_100_columns(cli: Cli) -> None:
    """Piped output is ASCII, at most 100 columns wide, and holds verdict, table, bars, reasons and the next command."""
    result = cli(*BASE)
    assert result.code == 0
    assert result.out.isascii()
    assert max(map(len, result.out.splitlines())) <= 100
    for part in (
        "est.",
        "MFU",
        "fits",
        "Plans",
        "largest loss",
        "Memory of a GPU",
        "Time of a step",
        "Why",
        "Assumed",
        "Next:",
    ):
        assert part in result.out
    assert "\x1b" not in result.out


def test_pins_hold(cli: Cli) -> None:
    """A pinned value is found in every plan; a framework that cannot have it is left out and said so."""
    document = cli(*BASE, "--pin", "tp=2,pp=2", "--json").document
    for plan in [document["best"], *document["alternatives"]]:
        assert (plan["strategy"]["tp"], plan["strategy"]["pp"]) == (2, 2)
    assert document["by_backend"]["fsdp"] is None
    assert document["request"]["pins"] == {"pp": 2, "tp": 2}


def test_one_backend(cli: Cli) -> None:
    """Asking for one framework searches only that one."""
    document = cli(*BASE, "--backend", "fsdp", "--json").document
    assert document["best"]["backend"] == "fsdp"
    assert document["by_backend"] == {}
    assert {plan["backend"] for plan in document["alternatives"]} <= {"fsdp"}


def test_objectives(cli: Cli) -> None:
    """Least memory takes no more memory than the fastest plan; lowest cost is no dearer per token."""
    fast = cli(*BASE, "--price", "2", "--json").document["best"]["estimate"]
    small = cli(*BASE, "--objective", "memory", "--json").document["best"]["estimate"]
    assert small["peak_memory_bytes"] <= fast["peak_memory_bytes"]
    cheap = cli(*BASE, "--objective", "cost", "--price", "2", "--json").document
    assert cheap["best"]["estimate"]["cost_per_million_tokens"] <= fast["cost_per_million_tokens"]
    assert any("lowest cost per token" in warning for warning in cheap["warnings"])


def test_cost_needs_a_price(cli: Cli) -> None:
    """Without a known price the objective cost asks for one."""
    result = cli("suggest", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "a40", "--objective", "cost")
    assert result.code == 2
    assert "--price" in result.err


def test_nothing_fits(cli: Cli) -> None:
    """No plan is exit code 3: reasons by count, the nearest miss, and a change that would work."""
    arguments = [
        "suggest",
        "--model",
        "llama-3.1-405b",
        "--gpus",
        "8",
        "--gpu",
        "a100-sxm-40gb",
        "--host-memory-gib",
        "64",
    ]
    result = cli(*arguments)
    assert result.code == 3, result.out
    assert result.out == ""
    assert "GiB" in result.err
    assert "hint: " in result.err
    error = cli(*arguments, "--json").document["error"]
    assert error["code"] == "no-plan-fits"
    assert set(error["details"]) == {"rejected", "nearest", "relaxations", "reasons"}
    assert error["details"]["nearest"]


def test_files(cli: Cli, tmp_path: Path) -> None:
    """--out writes the launch files and plan.json, refuses to overwrite, and does so with --force."""
    out = tmp_path / "run"
    result = cli(*BASE, "--out", str(out))
    assert result.code == 0, result.err
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {"plan.json", "launch.sh"} <= written
    for name in written:
        assert name in result.out
    again = cli(*BASE, "--out", str(out))
    assert again.code == 2
    assert "--force" in again.err
    assert cli(*BASE, "--out", str(out), "--force").code == 0
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    assert plan["best"]["backend"] in ("megatron", "deepspeed", "fsdp")


def test_render_prints_and_writes_the_same(cli: Cli, tmp_path: Path) -> None:
    """render without --out prints what render with --out writes."""
    path = tmp_path / "plan.json"
    path.write_text(cli(*BASE, "--json").out, encoding="utf-8")
    printed = cli("render", str(path), "--launcher", "slurm")
    assert printed.code == 0, printed.err
    files = cli("render", str(path), "--launcher", "slurm", "--out", str(tmp_path / "files"), "--json").document
    assert "job.sbatch" in files["files"]
    for name, text in files["files"].items():
        assert f"==> {name} <==" in printed.out
        assert (tmp_path / "files" / name).read_text(encoding="utf-8") == text


def test_bad_output_folder_is_found_before_the_search(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file given for --out is refused without searching."""
    from planner import service

    def never(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(service, "suggest", never)
    target = tmp_path / "file"
    target.write_text("mine", encoding="utf-8")
    result = cli(*BASE, "--out", str(target))
    assert result.code == 2
    assert target.read_text(encoding="utf-8") == "mine"


def test_time_limit(cli: Cli) -> None:
    """A tiny limit ends in a plan that is not called proven, or in exit code 4."""
    result = cli(*BASE, "--time-limit", "0.05", "--json")
    assert result.code in (0, 4)
    if result.code == 4:
        assert result.document["error"]["code"] == "time-limit"


def test_time_limit_where_nothing_fits(cli: Cli) -> None:
    """The limit holds for the search for changes that help, too: without one the answer says why, and what to do."""
    asked = ["suggest", "--model", "deepseek-v3", "--gpus", "8", "--gpu", "h100", "--json"]
    short = cli(*asked, "--time-limit", "0.01")
    assert short.code == 3
    error = short.document["error"]
    assert error["details"]["nearest"]
    assert error["details"]["relaxations"] == []
    assert "raise --time-limit" in error["hint"]


def test_interrupt_keeps_what_was_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first framework prints its plan, says so, and exits with 130."""
    from planner.service import searching

    real = searching._search

    def interrupted(request: object, name: str, *rest: object, **options: object) -> object:
        if name != "megatron":
            raise KeyboardInterrupt
        return real(request, name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(searching, "_search", interrupted)
    result = cli(*BASE, "--json")
    assert result.code == 130
    assert result.document["best"]["backend"] == "megatron"
    assert any("interrupted" in warning for warning in result.document["warnings"])


def test_rule_of_thumb_is_priced(cli: Cli) -> None:
    """On request the usual size-based rule is searched too, and the answer says how it compares."""
    result = cli("suggest", "--model", "llama-2-7b", "--gpus", "8", "--gpu", "h100", "--rule-of-thumb", "--json")
    assert result.code == 0
    line = result.document["best"]["why"][-1]
    assert line.startswith("rule of thumb (tutorial-9.1)")
    assert "% slower than the plan above" in line or "has no such plan" in line
    plain = cli("suggest", "--model", "llama-2-7b", "--gpus", "8", "--gpu", "h100", "--json")
    assert plain.document["best"]["strategy"] == result.document["best"]["strategy"]


def test_host_memory_is_offered(cli: Cli) -> None:
    """Where only host memory is short, more of it is offered first, and the offer works."""
    short = ["suggest", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100", "--backend", "megatron"]
    refused = cli(*short, "--host-memory-gib", "30", "--json")
    assert refused.code == 3
    assert "--host-memory-gib 60" in refused.document["error"]["hint"]
    assert cli(*short, "--host-memory-gib", "60", "--json").code == 0


def _interrupt_in_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the first framework's candidates are decided, when there is already a plan."""
    from planner.search import engine

    def interrupted(_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._Run, "_improve", interrupted)


def test_interrupt_inside_a_search_ends_it_all(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One Ctrl-C is enough: the plan found until then is shown and no other framework is searched."""
    _interrupt_in_the_solver(monkeypatch)
    result = cli(*BASE, "--json")
    assert result.code == 130
    assert list(result.document["by_backend"]) == ["megatron"]
    assert [warning for warning in result.document["warnings"] if "interrupted" in warning]
    assert not any("limit" in warning for warning in result.document["warnings"])


def test_interrupt_ends_the_comparison_of_cluster_sizes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --objective cost too: the sizes that were left are not tried, and the answer says how many were."""
    _interrupt_in_the_solver(monkeypatch)
    result = cli(*BASE, "--objective", "cost", "--json")
    assert result.code == 130
    assert any("(1 of " in warning for warning in result.document["warnings"])


def test_progress_says_what_was_found() -> None:
    """While a search runs its best plan and the bound are told, framework by framework."""
    from planner import service

    lines: list[str] = []
    request = service.PlanRequest(
        model="llama-3.1-8b", cluster=service.ClusterInput(gpu="h100", gpus=16), job=service.JobInput()
    )
    service.suggest(request, lambda state: lines.append(str(state)))
    for name in ("megatron", "deepspeed", "fsdp"):
        assert any(re.fullmatch(rf"searching {name}: best .+ a step, nothing under .+ candidates", x) for x in lines)
