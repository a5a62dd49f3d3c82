"""Measured-run records for tests: a small valid one with changes, files of them, and predictions that depend on the id
alone."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner.accuracy.predict import Prediction
from planner.specs.measurement import MeasuredRun
from planner.units import GIB

_RECORD: dict[str, Any] = {
    "id": "lab/8b",
    "source": {"title": "run log"},
    "model": {
        "name": "llama3-8b", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "vocab": 128256, "seq_len": 4096, "gated_mlp": True, "tied_embeddings": False,
    },
    "hardware": {"gpu": "h100", "gpus": 16, "gpus_per_node": 8},
    "run": {
        "framework": "megatron-lm", "precision": "bf16", "tp": 2, "sequence_parallel": True, "pp": 1, "vpp": 1, "cp": 1,
        "dp": 8, "zero": 1, "micro_batch": 1, "global_batch": 64, "recompute": "none", "flash_attention": True,
    },
    "measured": {"step_time_s": 3.0, "oom": False},
}  # fmt: skip


def record(name: str = "lab/8b", **changes: Any) -> dict[str, Any]:
    """A record; ``run__tp=4`` changes a field of a group."""
    result = copy.deepcopy(_RECORD)
    result["id"] = name
    for path, value in changes.items():
        *groups, field = path.split("__")
        target = result
        for group in groups:
            target = target[group]
        target[field] = value
    return result


def measured_run(name: str = "lab/8b", **changes: Any) -> MeasuredRun:
    """The same as the planner reads it."""
    return MeasuredRun.model_validate(record(name, **changes))


def record_file(path: Path, records: Iterable[dict[str, Any] | str]) -> Path:
    """A file with one line a record; texts are written as they are."""
    lines = [item if isinstance(item, str) else json.dumps(item) for item in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def made_up_prediction(run: MeasuredRun) -> Prediction:
    """A prediction that follows from the id and the measurement, to compare two ways of scoring."""
    draw = [byte / 255 for byte in hashlib.sha256(run.id.encode("utf-8")).digest()[:4]]
    if draw[0] < 0.05:
        return Prediction(run.id, None, None, None, "made up")
    step, memory = run.measured.step_time_s, run.measured.peak_mem_gib
    return Prediction(
        run.id,
        None if step is None else step * (0.6 + 0.8 * draw[1]),
        None if memory is None else memory * GIB * (0.7 + 0.5 * draw[2]),
        draw[3] < 0.8,
    )
