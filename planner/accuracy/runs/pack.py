"""Packs a folder of record files into the public records that come with the planner, one archive a collection.

``python -m planner.accuracy.runs.pack FOLDER``.  Facts of a run and its source are kept; prose, figures that other
tools predicted, and measured figures that nothing is compared with are left out.  The archives are the same bytes every
time.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.accuracy.runs.records import DATA
from planner.specs.measurement import (
    Fact,
    Measured,
    MeasuredConfiguration,
    MeasuredHardware,
    MeasuredModel,
    MeasuredSource,
)

LONGEST_TEXT = 200
"""Longer texts in ``run.extra`` are prose."""
_GROUPS: dict[str, type[Fact]] = {
    "source": MeasuredSource,
    "model": MeasuredModel,
    "hardware": MeasuredHardware,
    "run": MeasuredConfiguration,
    "measured": Measured,
}
_KEPT_BESIDE = {"measured": ("hardware_tflops_per_gpu", "mfu", "status")}
"""Fields without a place in the schema that readers of the records want."""
_NOT_OF_THE_RUN = frozenset(
    {
        # measured or counted by somebody, and compared with nothing
        "aggregate_pflops", "allocated_gib_after_step", "allocated_mib", "backward_ms", "forward_ms", "initial_loss",
        "max_reserved_bytes", "mem_allocated_gb", "mem_max_reserved_gb", "memory_allocated_gib",
        "peak_alloc_gib_by_rank", "peak_gib_if_decimal_gb", "peak_observed_gpu_memory_mib", "peak_reserved_gib",
        "profiled_ms_F_B_W_comm", "reserved_mib", "step_std", "throughput_change_pct", "total_tokens_per_s",
        "training_days_300B_tokens", "weak_scaling_efficiency_pct", "without_cp_tflops",
        # predicted by other tools or formulas
        "paper_formula_activation_percent_of_tp_baseline", "paper_formula_memory_gib", "simumax_predicted",
        "theoretical_weight_optimizer_mb",
        # remarks on how the record was made
        "flags_not_in_sheet",
    }
)  # fmt: skip
_ELSEWHERE = re.compile(r";? see [A-Z]+\.md| \(index id \d+\)")
"""Pointers to what does not come with the records."""


def packed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without nulls and without what the planner has no use for."""
    result: dict[str, Any] = {"id": record["id"]}
    for name, spec in _GROUPS.items():
        wanted = (*spec.model_fields, *_KEPT_BESIDE.get(name, ()))
        group = record.get(name) or {}
        result[name] = {key: _plain(group[key]) for key in wanted if group.get(key) is not None and key != "extra"}
    extra = {key: _plain(value) for key, value in (record["run"].get("extra") or {}).items() if _is_fact(key, value)}
    if extra:
        result["run"]["extra"] = extra
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return _ELSEWHERE.sub("", value) if isinstance(value, str) else value


def _is_fact(key: str, value: Any) -> bool:
    if value is None or key in _NOT_OF_THE_RUN:
        return False
    return isinstance(value, dict) or len(json.dumps(value)) <= LONGEST_TEXT


def archive(records: list[dict[str, Any]]) -> bytes:
    """Records as compressed lines; no name and no time of day go into the header."""
    lines = "".join(json.dumps(packed(record), separators=(",", ":")) + "\n" for record in records)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream:
        stream.write(lines.encode())
    return buffer.getvalue()


def main(folder: Path) -> None:
    """Replace the archives by those of the ``*.jsonl`` files of the folder."""
    sources = sorted(folder.glob("*.jsonl"))
    if not sources:
        raise SystemExit(f"{folder}: no *.jsonl files")
    DATA.mkdir(exist_ok=True)
    for old in DATA.glob("*.jsonl.gz"):
        old.unlink()
    for source in sources:
        records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        (DATA / f"{source.name}.gz").write_bytes(archive(records))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m planner.accuracy.runs.pack FOLDER")
    main(Path(sys.argv[1]))
