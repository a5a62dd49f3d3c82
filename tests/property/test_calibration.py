"""Calibration finds a factor that made-up runs were made with, and a bad record never touches the others."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.accuracy.comparison.report import scored
from planner.accuracy.fits.calibration import calibrate
from planner.accuracy.predict import cases_of, predict
from planner.accuracy.runs.interpret import Case
from planner.accuracy.runs.records import Records, read_records
from planner.cost.constants import published_constants
from planner.specs.measurement import MeasuredRun
from tests.accuracy_records import measured_run, record

SLOW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAYOUTS: list[dict[str, Any]] = [
    {"run__tp": 1, "run__dp": 16},
    {"run__tp": 2, "run__dp": 8},
    {"run__tp": 8, "run__dp": 2},
    {"run__tp": 16, "run__dp": 1},
    {"run__micro_batch": 2},
    {"run__tp": 2, "run__pp": 4, "run__vpp": 1, "run__dp": 2},
]


def _measured(changes: list[dict[str, Any]], factors: dict[str, float]) -> list[MeasuredRun]:
    """Runs whose step times are those of a machine with these factors."""
    runs = [measured_run(f"lab/{index}", **change) for index, change in enumerate(changes)]
    cases: list[Case] = cases_of(runs)[0]
    found = predict(cases, published_constants().with_factors(factors))
    return [
        run.model_copy(update={"measured": run.measured.model_copy(update={"step_time_s": prediction.step_time_s})})
        for run, prediction in zip(runs, found, strict=True)
    ]


@SLOW
@given(speed=st.floats(0.5, 1.8), layout=st.sampled_from(LAYOUTS))
def test_one_run_finds_the_speed(speed: float, layout: dict[str, Any]) -> None:
    """With every rate times and every fixed time divided by one factor, one run of any layout finds it."""
    names = calibrate(Records(runs=_measured([layout], {}))).profile.factors
    factors = {name: 1 / speed if name.endswith("_s") and "bytes" not in name else speed for name in names}
    profile = calibrate(Records(runs=_measured([layout], factors))).profile
    assert profile.factors["gemm_share"] == pytest.approx(speed, rel=0.05)


@SLOW
@given(compute=st.floats(0.7, 1.3), network=st.floats(0.6, 1.5))
def test_several_runs_tell_computing_from_communication(compute: float, network: float) -> None:
    """Every run is predicted well, and communication moves to the right side of computing."""
    shares = ("gemm_share", "attention_forward_share", "attention_backward_share", "stream_share")
    factors = dict.fromkeys(shares, compute) | {"fabric_bus_share": network, "network_share": network}
    result = calibrate(Records(runs=_measured(LAYOUTS, factors)))
    assert result.median_after < 0.03
    found = result.profile.factors
    assert found["gemm_share"] == pytest.approx(compute, rel=0.12)
    if abs(network / compute - 1) > 0.25:
        assert (found["network_share"] > found["gemm_share"]) == (network > compute)


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["fp8", "h100"])
)
BROKEN: st.SearchStrategy[Any] = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
FIELDS = [
    *(f"{group}__{field}" for group in ("model", "hardware", "run", "measured") for field in record()[group]),
    *("model", "hardware", "run", "measured", "source", "run__extra", "model__moe", "model__mla", "model__hybrid"),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(field=st.sampled_from(FIELDS), value=BROKEN, number=st.integers(-2, 10**12), plain=st.booleans())
def test_a_bad_record_changes_nothing_else(field: str, value: Any, number: int, plain: bool) -> None:
    """Whatever stands in one field, the record beside it is predicted as if alone, and nothing raises."""
    try:
        bad = json.dumps(record("bad", **{field: number if plain else value}))
    except (TypeError, ValueError):
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        path.write_text(f"{json.dumps(record('good'))}\n{bad}\n{json.dumps(record('other', run__tp=4, run__dp=4))}\n")
        rows = {row.run.id: row.prediction for row in scored(read_records([path]).runs)}
    alone = {row.run.id: row.prediction for row in scored([measured_run("good")])}
    assert rows["good"] == alone["good"]
    assert rows["other"].step_time_s
