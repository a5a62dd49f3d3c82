"""The whole loop on the processor of this machine: calibrate it, then train ten plans that calibration did not see and
compare step time, memory and gradients with the estimates.

``python -m pytest tests/bench/test_validation_loop.py -m bench -s`` prints the table of docs/validation.md; it takes
about ten minutes and wants a quiet machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.specs.validation import ValidationReport
from planner.units import MIB
from planner_validate.calibration.calibrating import Options as CalibrationOptions
from planner_validate.calibration.calibrating import calibrate_this_machine
from planner_validate.runs.options import Options
from planner_validate.runs.running import run

pytestmark = pytest.mark.bench
pytest.importorskip("torch", reason="the runs need it")

PROCESSES = 4
MOST_TIME_ERROR, MOST_MEMORY_ERROR, LEAST_WITHIN, LEAST_RANK_CORRELATION = 0.25, 0.10, 8, 0.8

DENSE = {
    "name": "dense-7m",
    "layers": 8,
    "hidden": 256,
    "ffn": 688,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "vocab": 2048,
    "max_seq": 4096,
}
WIDE = {**DENSE, "name": "wide-10m", "layers": 4, "hidden": 384, "ffn": 1024, "heads": 6, "kv_heads": 2, "head_dim": 64}
EXPERTS = {**DENSE, "name": "experts-6m", "layers": 4, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 344}}


@dataclass(frozen=True)
class Case:
    """A model, the tokens of its sequences, and the strategy to train it with."""

    name: str
    model: dict[str, Any]
    seq_len: int
    global_batch: int
    strategy: StrategyInput


CASES = (
    Case("dense, DDP", DENSE, 128, 32, StrategyInput(zero_stage=0, micro_batch=4)),
    Case("dense, FSDP", DENSE, 128, 32, StrategyInput(zero_stage=3, micro_batch=4)),
    Case("dense, TP 2 x DP 2", DENSE, 128, 32, StrategyInput(tp=2, zero_stage=0, micro_batch=4)),
    Case("dense, PP 2 x DP 2", DENSE, 128, 32, StrategyInput(pp=2, zero_stage=0, micro_batch=2)),
    Case("experts, EP 2 x DP 4", EXPERTS, 128, 32, StrategyInput(ep=2, zero_stage=0, micro_batch=4)),
    Case("wide, DDP", WIDE, 256, 16, StrategyInput(zero_stage=0, micro_batch=2)),
    Case("wide, FSDP, all recomputed", WIDE, 256, 32, StrategyInput(zero_stage=3, micro_batch=2, recompute="full")),
    Case("wide, hybrid 2 x 2", WIDE, 256, 16, StrategyInput(zero_stage=3, shard_degree=2, micro_batch=2)),
    Case("wide, PP 4", WIDE, 256, 16, StrategyInput(pp=4, zero_stage=0, micro_batch=2)),
    Case("wide, TP 2 x PP 2", WIDE, 256, 24, StrategyInput(tp=2, pp=2, zero_stage=0, micro_batch=4)),
)


def trained(case: Case, profile: Path, folder: Path) -> ValidationReport:
    """The report of one case."""
    model = folder / f"{case.model['name']}.yaml"
    model.write_text(yaml.safe_dump(case.model), encoding="utf-8")
    document = estimate(
        str(model),
        ClusterInput(gpu="cpu", gpus=PROCESSES),
        JobInput(seq_len=case.seq_len, global_batch=case.global_batch),
        case.strategy,
        backend="pytorch",
        profile=profile,
    )
    return run(document, Options())


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def test_calibration_predicts_plans_that_it_did_not_see(tmp_path: Path) -> None:
    """Eight of ten step times within 25 % and in the right order, every peak within 10 %, every gradient equal."""
    profile = tmp_path / "machine.yaml"
    result = calibrate_this_machine(CalibrationOptions(gpu="cpu", processes=PROCESSES))
    profile.write_text(yaml.safe_dump(result.profile.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    reports = [trained(case, profile, tmp_path) for case in CASES]
    print("\n| plan | step predicted | measured | error | spread | MiB predicted | measured | error | gradients |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case, found in zip(CASES, reports, strict=True):
        time, memory, gradients = found.step_time, found.peak_memory, found.gradients
        assert time is not None
        assert memory is not None
        assert gradients is not None
        print(
            f"| {case.name} | {time.predicted * 1e3:,.0f} ms | {(time.measured or 0) * 1e3:,.0f} ms "
            f"| {100 * (time.error or 0):+.0f} % | {100 * (time.spread or 0):.0f} % | {memory.predicted / MIB:.1f} "
            f"| {(memory.measured or 0) / MIB:.1f} | {100 * (memory.error or 0):+.1f} % "
            f"| {gradients.largest_relative_error:.0e} |"
        )
    times = [found.step_time for found in reports if found.step_time is not None]
    order = rank_correlation([time.predicted for time in times], [time.measured or 0.0 for time in times])
    close = sum(abs(time.error or 1.0) <= MOST_TIME_ERROR for time in times)
    print(f"within {MOST_TIME_ERROR:.0%}: {close} of {len(times)}; rank correlation {order:.2f}")
    assert all(found.gradients is not None and found.gradients.passed for found in reports)
    assert all(abs(found.peak_memory.error or 1.0) <= MOST_MEMORY_ERROR for found in reports if found.peak_memory)
    assert close >= LEAST_WITHIN
    assert order >= LEAST_RANK_CORRELATION
