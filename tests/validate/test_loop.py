"""The whole way on this machine's processor: suggest a plan, write its files, train it, compare, record, calibrate with
the records, and be closer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.cli.main import run

pytest.importorskip("torch", reason="the runs need it")
pytestmark = pytest.mark.torch

MODEL = {
    "name": "dense-2m",
    "layers": 4,
    "hidden": 160,
    "ffn": 432,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 20,
    "vocab": 1024,
    "max_seq": 1024,
}
PLANS = {
    "plain": (2, "tp=1,pp=1,zero_stage=0"),
    "sharded": (2, "tp=1,pp=1,zero_stage=3"),
    "tensor": (4, "tp=2,pp=1,cp=1,zero_stage=0"),
    "pipeline": (4, "tp=1,pp=2,vpp=1,cp=1,zero_stage=0"),
}
MEMORY_ERROR = 0.10


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and standard output of the command line."""
    code = run([*arguments])
    said = capsys.readouterr()
    assert code in (0, 5), said.err
    return code, said.out


def test_suggest_render_validate_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four kinds of plan; memory is as predicted, gradients are equal, and the machine's own runs narrow the error."""
    model, records = tmp_path / "model.yaml", tmp_path / "runs.jsonl"
    model.write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    for name, (processes, pins) in PLANS.items():
        question = ["--model", str(model), "--gpus", str(processes), "--gpu", "cpu", "--backend", "pytorch"]
        job = ["--seq-len", "64", "--global-batch", "16", "--pin", pins]
        _, document = call(capsys, "suggest", *question, *job, "--json")
        plan = tmp_path / f"{name}.json"
        plan.write_text(document, encoding="utf-8")
        call(capsys, "render", str(plan), "--out", str(tmp_path / name))
        assert (tmp_path / name / "run.json").exists()
        _, found = call(capsys, "validate", str(plan), "--json", "--record", str(records))
        report = json.loads(found)
        assert report["verdict"] in ("within", "outside"), report["failures"]
        assert report["gradients"]["largest_relative_error"] <= 1e-4
        memory = report["peak_memory"]
        assert memory["predicted"] == pytest.approx(memory["measured"], rel=MEMORY_ERROR), name
    assert len(records.read_text(encoding="utf-8").splitlines()) == len(PLANS)
    _, fitted = call(capsys, "calibrate", "--from-records", str(records), "--json")
    calibration = json.loads(fitted)
    assert len(calibration["profile"]["runs"]) == len(PLANS)
    assert calibration["median_after"] <= calibration["median_before"]
