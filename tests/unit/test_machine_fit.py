"""Factors on the published constants from what was timed on a machine: made-up machines are found again, and what the
measurements do not say stays as published."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import pytest

from planner.accuracy.fits.hosts import TrainingRun, step_times
from planner.accuracy.fits.machine import Found, Question, calibration, fit, with_runs
from planner.backends import get_backend
from planner.service import ClusterInput, resolve_cluster
from planner.service.profiles import profile_assumption
from planner.specs.benchmark import BenchmarkKind
from planner.specs.job import Precision
from planner.specs.profile import LEAST_FACTOR, MOST_FACTOR, MachineCalibration, MachineMeasurement
from planner_validate.calibration.probes import training_runs
from tests.strategies import machines

GEMMS: tuple[BenchmarkKind, ...] = ("gemm forward", "gemm input gradient", "gemm weight gradient")
COLLECTIVES: tuple[BenchmarkKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
BLOCK = {"tokens": 4, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 32}
LEAST_LAYER = {"tokens": 1, "hidden": 2, "heads": 1, "kv_heads": 1, "head_dim": 2, "ffn": 2}


def question(gpu: str, ranks: int) -> Question:
    return Question(resolve_cluster(ClusterInput(gpu=gpu, gpus=ranks)).cluster, get_backend("pytorch"))


def piece(kind: BenchmarkKind, ranks: int = 1, precision: Precision = "fp32", **shape: int) -> MachineMeasurement:
    return MachineMeasurement(
        kind=kind, shape=shape, ranks=ranks, precision=precision, seconds=1.0, spread=0.01, repeats=9
    )


def work(scale: int, ranks: Iterable[int], precision: Precision) -> list[MachineMeasurement]:
    """One of everything at sizes of 256 (a processor) to ``scale`` times as much."""
    large = 256 * scale
    matrices = [(large, large, large), (large // 4, large, large // 4), (large, large // 4, large)]
    matrices += [(large // 4, large // 4, large // 4), (1, 1, 1)]
    rows = [
        piece(kind, precision=precision, tokens=tokens, inputs=inputs, outputs=outputs)
        for tokens, inputs, outputs in matrices
        for kind in GEMMS
    ]
    kinds: tuple[BenchmarkKind, ...] = ("attention forward", "attention backward")
    for kind in kinds:
        rows += [piece(kind, precision=precision, batch=1, heads=1, kv_heads=1, length=1, width=2)]
        rows += [
            piece(kind, precision=precision, batch=1, heads=8, kv_heads=4, length=length, width=width)
            for length in (large // 4, large, 4 * large)
            for width in (64, 128)
        ]
    rows += [piece("copy", bytes=size) for size in (1 << 24, 1 << 26)]
    layer = BLOCK | {"hidden": large, "ffn": 3 * large, "heads": 4, "kv_heads": 4, "head_dim": large // 4}
    rows += [piece("elementwise", precision=precision, **LEAST_LAYER)]
    rows += [piece("elementwise", precision=precision, **(layer | {"tokens": tokens})) for tokens in (256, 1024)]
    rows += [piece("block", precision=precision, **BLOCK), piece("optimizer", parameters=1 << 22)]
    rows += [piece("cpu optimizer", parameters=1 << 22)]
    rows += [
        piece(kind, size, bytes=message)
        for kind in COLLECTIVES
        for size in ranks
        for message in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
        if kind != "send" or size == 2
    ]
    return rows


def timed(
    asked: Question, rows: list[MachineMeasurement], factors: Mapping[str, float], issue_s: float = 0.0
) -> list[MachineMeasurement]:
    """The rows as a machine with these factors would do them; ``issue_s`` to issue one."""
    pieces = asked.pieces(factors)
    done = []
    for row in rows:
        if row.smallest:
            seconds = issue_s or 1e-9
        elif row.kind in (*GEMMS, "attention forward", "attention backward", "elementwise") and asked.host_adds:
            seconds = issue_s + pieces.seconds(row)
        else:
            seconds = pieces.seconds(row)
        done.append(row.model_copy(update={"seconds": seconds}))
    return done


def calibrated(asked: Question, rows: list[MachineMeasurement]) -> MachineCalibration:
    return calibration(asked, rows, device_name="a machine", host="here", versions={"torch": "2.13"}, processes=4)


GPU_FACTORS = {
    "stream_share": 0.9,
    "gemm_share": 0.8,
    "gemm_half_k": 1.5,
    "gemm_half_mn": 0.7,
    "attention_forward_share": 1.2,
    "attention_backward_share": 0.8,
    "attention_half_length": 2.0,
    "launch_s": 2.0,
    "fabric_bus_share": 0.7,
    "fabric_half_message_bytes": 0.5,
    "fabric_latency_s": 1.7,
    "optimizer_traffic_share": 0.8,
    "cpu_adam_bytes_per_s": 1.4,
}
CPU_FACTORS = {
    "stream_share": 1.8,
    "gemm_share": 0.5,
    "gemm_half_k": 3.0,
    "gemm_half_mn": 2.0,
    "attention_forward_share": 0.5,
    "attention_backward_share": 0.7,
    "launch_s": 1.6,
    "fabric_bus_share": 1.5,
    "fabric_half_message_bytes": 3.0,
    "fabric_latency_s": 4.0,
    "fabric_hop_s": 2.5,
    "optimizer_traffic_share": 2.5,
    "cpu_adam_bytes_per_s": 5.0,
}


@pytest.mark.parametrize(
    ("gpu", "ranks", "scale", "factors", "issue_s"),
    [("h100", 8, 32, GPU_FACTORS, 0.0), ("cpu", 4, 2, CPU_FACTORS, 2e-6), ("cpu", 64, 2, CPU_FACTORS, 2e-6)],
    ids=["GPUs", "processor", "processes that share cores"],
)
def test_a_made_up_machine_is_found(
    gpu: str, ranks: int, scale: int, factors: dict[str, float], issue_s: float
) -> None:
    """Every factor comes back, and the model then reproduces every measurement."""
    asked = question(gpu, ranks)
    precision: Precision = "fp32" if gpu == "cpu" else "bf16"
    result = calibrated(asked, timed(asked, work(scale, (2, ranks), precision), factors, issue_s))
    found = result.profile.factors
    assert {name: found[name] for name in factors} == pytest.approx(factors, rel=0.06)
    assert max(result.residuals.values()) < 0.01
    assert result.warnings == ()


def test_noise_and_a_disturbed_measurement() -> None:
    """Scatter of some percent and one measurement that is ten times too long move the rates by little; the spread of
    the disturbed one is told."""
    asked = question("cpu", 2)
    rows = timed(asked, work(2, (2,), "fp32"), CPU_FACTORS, 2e-6)
    chance = random.Random(3)
    rows = [row.model_copy(update={"seconds": row.seconds * chance.uniform(0.95, 1.05)}) for row in rows]
    largest = max((row for row in rows if row.kind == "gemm forward"), key=lambda row: row.seconds)
    disturbed = largest.model_copy(update={"seconds": 10.0 * largest.seconds, "spread": 0.8})
    rows = [disturbed if row is largest else row for row in rows]
    result = calibrated(asked, rows)
    assert result.profile.factors["gemm_share"] == pytest.approx(CPU_FACTORS["gemm_share"], rel=0.15)
    assert result.profile.factors["fabric_bus_share"] == pytest.approx(CPU_FACTORS["fabric_bus_share"], rel=0.15)
    assert any("1 of" in line and "other programs" in line for line in result.warnings)


def test_what_is_not_measured_stays_as_published() -> None:
    """Copies alone say nothing but the memory bandwidth; nothing at all says nothing."""
    asked = question("cpu", 2)
    rows = timed(asked, [piece("copy", bytes=1 << 26)], {"stream_share": 0.5})
    assert fit(asked, rows).factors == {"stream_share": pytest.approx(0.5, rel=0.01)}
    assert fit(asked, []) == Found({}, {})


def test_issuing_is_not_taken_for_working() -> None:
    """Where issuing takes longer than the work, a processor shows their sum and a GPU the longer of the two."""
    for gpu, precision in (("cpu", "fp32"), ("h100", "bf16")):
        asked = question(gpu, 2)
        small = [
            piece(kind, precision=precision, tokens=size, inputs=size, outputs=size)  # type: ignore[arg-type]
            for kind in GEMMS
            for size in (1, 32, 4096, 8192)
        ]
        pieces = asked.pieces({})
        issue_s = 1e-3
        rows = []
        for row in small:
            work_s = 0.0 if row.smallest else pieces.seconds(row)
            rows.append(row.model_copy(update={"seconds": issue_s + work_s if gpu == "cpu" else max(issue_s, work_s)}))
        found = fit(asked, rows).factors
        assert found["gemm_share"] == pytest.approx(1.0, rel=0.02), gpu


def test_gather_and_scatter_are_one_formula() -> None:
    """Their mean is what the model reproduces, because training does both."""
    asked = question("cpu", 2)
    rows = timed(asked, work(2, (2,), "fp32"), {})
    changed = {"all-gather": 0.5, "reduce-scatter": 1.5}
    rows = [row.model_copy(update={"seconds": row.seconds * changed.get(row.kind, 1.0)}) for row in rows]
    assert fit(asked, rows).factors["fabric_latency_s"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("speed", "edge"), [(1e-4, LEAST_FACTOR), (1e4, MOST_FACTOR)])
def test_another_machine_altogether(speed: float, edge: float) -> None:
    """A factor beyond what a profile holds ends at its edge, and the doubt is told."""
    asked = question("cpu", 2)
    rows = [
        row.model_copy(update={"seconds": row.seconds / speed})
        for row in timed(asked, [piece("copy", bytes=1 << size) for size in (24, 25, 26, 27)], {})
    ]
    result = calibrated(asked, rows)
    assert result.profile.factors == {"stream_share": edge}
    assert "is it a cpu?" in result.warnings[0]


def test_more_than_the_hardware_can_do() -> None:
    """A share of a GPU's peak above 1 is told: the catalogue's entry is of another card."""
    asked = question("h100", 1)
    rows = timed(asked, work(32, (), "bf16"), {"stream_share": 1.6})
    assert any(line.startswith("stream_share becomes 1.") for line in calibrated(asked, rows).warnings)


def test_words_of_a_plan() -> None:
    """A plan says that its profile was measured, when and with how many processes, and whether somebody edited it."""
    asked = question("cpu", 4)
    profile = calibrated(asked, timed(asked, work(2, (2, 4), "fp32"), CPU_FACTORS)).profile
    said = profile_assumption(profile)
    assert f"of {profile.created}, measured on the machine with 4 processes" in said.why
    assert f"({len(profile.measurements)} measurements)" in said.why
    assert "edited" not in said.why
    assert str(said.value).startswith("cpu_adam_bytes_per_s x ")
    edited = profile.model_copy(update={"factors": profile.factors | {"launch_s": 3.0}})
    assert "edited by hand" in profile_assumption(edited).why


RUN_FACTORS = {
    "gemm_share": 0.5,
    "attention_forward_share": 0.5,
    "attention_backward_share": 0.7,
    "stream_share": 1.8,
    "launch_s": 2.4,
    "tensor_parallel_launch_factor": 8.0,
    "sharding_launch_factor": 3.0,
    "stage_sync_s": 4.0,
    "moe_host_s": 2.0,
    "step_overhead_s": 3.0,
}


def trained(asked: Question, ranks: int, factors: Mapping[str, float]) -> list[TrainingRun]:
    """The runs of a calibration as a machine with these factors would do them."""
    runs = [TrainingRun(config, 1.0) for config in training_runs(machines("cpu", ranks), "cpu", "fp32", threads=1)]
    seconds = step_times(asked.cluster, asked.backend, runs, factors)
    return [TrainingRun(run.config, float(time)) for run, time in zip(runs, seconds, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_runs_find_what_the_host_costs(ranks: int) -> None:
    """With the rates from small measurements, short training runs find the times of launches, tensor parallelism,
    sharding, stages and experts, and then come out as they were."""
    asked = question("cpu", ranks)
    rows = timed(asked, work(2, (2, ranks), "fp32"), RUN_FACTORS | {"launch_s": 1.6}, 2e-6)
    runs = trained(asked, ranks, RUN_FACTORS)
    result = calibration(asked, rows, device_name="a machine", host="here", versions={}, processes=ranks, runs=runs)
    found = result.profile.factors
    assert found["launch_s"] == pytest.approx(RUN_FACTORS["launch_s"], rel=0.3)
    assert found["moe_host_s"] == pytest.approx(RUN_FACTORS["moe_host_s"], rel=0.3)
    for name in ("tensor_parallel_launch_factor", "sharding_launch_factor"):
        # What counts in a step is their product with the time of a launch.
        product = found[name] * found["launch_s"]
        assert product == pytest.approx(RUN_FACTORS[name] * RUN_FACTORS["launch_s"], rel=0.15), name
    assert found["gemm_share"] == pytest.approx(RUN_FACTORS["gemm_share"], rel=0.05)
    assert len(result.profile.runs) == len(runs)
    for run in result.profile.runs:
        assert abs(run.error_after or 0.0) < 0.08, run
        assert abs(run.error_after or 0.0) < abs(run.error_before or 0.0), run
    assert f"and {len(runs)} training runs" in profile_assumption(result.profile).why


def test_runs_without_partners_say_nothing_of_them() -> None:
    """A single process has neither tensor parallelism nor stages: their constants stay as published."""
    asked = question("cpu", 1)
    runs = trained(asked, 1, RUN_FACTORS)
    rows = timed(asked, work(2, (), "fp32"), RUN_FACTORS, 2e-6)
    found = with_runs(asked, fit(asked, rows), runs).factors
    for name in ("tensor_parallel_launch_factor", "sharding_launch_factor", "stage_sync_s", "fabric_latency_s"):
        assert name not in found


def test_a_run_that_was_disturbed() -> None:
    """One run of twelve that took five times as long leaves the others predicted within some percent."""
    asked = question("cpu", 2)
    runs = trained(asked, 2, RUN_FACTORS)
    slow = TrainingRun(runs[3].config, 5.0 * runs[3].step_time_s)
    rows = timed(asked, work(2, (2,), "fp32"), RUN_FACTORS, 2e-6)
    result = calibration(
        asked,
        rows,
        device_name="a machine",
        host="here",
        versions={},
        processes=2,
        runs=[slow if run is runs[3] else run for run in runs],
    )
    errors = sorted(abs(run.error_after or 0.0) for run in result.profile.runs)
    assert errors[len(errors) // 2] < 0.1
