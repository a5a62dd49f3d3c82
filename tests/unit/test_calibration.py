"""Calibration: what it refuses, what it fits from how many runs, and what one run of an unseen framework is worth."""

from __future__ import annotations

from typing import Any

import pytest

from planner.accuracy.comparison.report import scored
from planner.accuracy.fits.calibration import KNOBS, calibrate
from planner.accuracy.fits.transfer import SETS, transfer
from planner.accuracy.fits.usable import check_usable
from planner.accuracy.runs.records import Records, public_records, public_runs
from planner.cost.constants import Constants
from planner.errors import InputError
from planner.specs.measurement import MeasuredRun
from tests.accuracy_records import measured_run


def records(*runs: MeasuredRun) -> Records:
    return Records(runs=list(runs))


def test_knobs_name_constants() -> None:
    """Every constant that a factor acts on exists."""
    for knob in KNOBS:
        assert set(knob.multiplies) | set(knob.divides) <= set(Constants.__dataclass_fields__)


REFUSED: dict[str, tuple[list[MeasuredRun], str]] = {
    "nothing": ([], "no run with a step time"),
    "no step time": ([measured_run(measured__step_time_s=None)], "no run with a step time"),
    "no batch": ([measured_run(run__global_batch=None)], "no run with a step time"),
    "unknown GPU": ([measured_run(hardware__gpu="h1000")], "no run with a step time"),
    "two GPUs": ([measured_run("a"), measured_run("b", hardware__gpu="a100")], "several accelerators"),
    "two frameworks": ([measured_run("a"), measured_run("b", run__framework="nemo")], "several frameworks"),
    "contradiction": ([measured_run("a"), measured_run("b", measured__step_time_s=3.8)], "contradict"),
    "time of a micro-batch": ([measured_run(measured__step_time_s=0.1)], "implausible factor on speed"),
    "seconds for milliseconds": ([measured_run(measured__step_time_s=3000.0)], "implausible factor on speed"),
    "micro-seconds": ([measured_run(measured__step_time_s=3e-6)], "implausible factor on speed"),
    "memory of another GPU": (
        [
            measured_run("a"),
            measured_run("b", hardware__gpu="a100", measured__step_time_s=None, measured__peak_mem_gib=30.0),
        ],
        "several accelerators",
    ),
    "memory of another framework": (
        [
            measured_run("a"),
            measured_run("b", run__framework="nemo", measured__step_time_s=None, measured__peak_mem_gib=30.0),
        ],
        "several frameworks",
    ),
    "no training step": ([measured_run(run__extra={"task": "ci-test"})], "no run with a step time"),
    "no such matrix rate": (
        [measured_run(hardware__gpu="tpu-v5p", run__framework="fsdp2", run__precision="fp16")],
        "no run with a step time",
    ),
    "tiny memory": ([measured_run(measured__peak_mem_gib=0.5)], "implausible factor on memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Too little, contradictory and implausible data are refused with what was found and what to do."""
    runs, what = REFUSED[name]
    with pytest.raises(InputError, match=what) as problem:
        calibrate(records(*runs))
    assert problem.value.where == "--from-records"
    assert problem.value.got
    assert problem.value.hint


def test_implausible_factor_is_the_one_that_was_found() -> None:
    """Times in milliseconds: the factor is about a thousandth, not the end of a scale."""
    (row,) = scored([measured_run()])
    run = measured_run(measured__step_time_s=1000.0 * (row.prediction.step_time_s or 0.0))
    with pytest.raises(InputError, match="implausible factor on speed") as problem:
        calibrate(records(run))
    # The prior keeps it from the whole way.
    assert 0.001 < float((problem.value.got or "").split()[0]) < 0.003
    assert "in seconds" in (problem.value.hint or "")


def test_factors_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors that are plausible alone and beyond a profile's bounds together are refused."""
    monkeypatch.setattr("planner.accuracy.fits.calibration._factors", lambda *_: {"step_overhead_s": 60.0})
    with pytest.raises(InputError, match="step_overhead_s") as problem:
        calibrate(records(measured_run()))
    assert problem.value.allowed == "from 0.02 to 50"


def test_runs_that_say_nothing_of_the_machine() -> None:
    """Runs that ended out of memory, tests of the framework, runs without figures and runs that cannot be priced are
    left out with the reason, and change nothing."""
    alone = calibrate(records(measured_run("a")))
    others = [
        measured_run("oom", measured__oom=True, measured__step_time_s=9.0, measured__peak_mem_gib=80.0),
        measured_run("ci", run__extra={"task": "ci-test"}, measured__step_time_s=9.0),
        measured_run("silent", hardware__gpu="a100", measured__step_time_s=None),
        measured_run("no batch", run__global_batch=None, run__micro_batch=4),
        measured_run("cannot", run__dp=3),
    ]
    result = calibrate(records(measured_run("a"), *others))
    assert result.profile == alone.profile
    assert set(result.skipped) == {"oom", "ci", "silent", "no batch", "cannot"}
    assert result.skipped["oom"] == "ended out of memory"
    assert result.skipped["no batch"] == "global batch not stated"
    assert all(result.skipped.values())


def test_worse_from_the_others() -> None:
    """Runs that have no common cause are told so: one is half as slow as predicted, the other twice as slow."""
    runs = _layouts(2)
    times = [(run.measured.step_time_s or 0.0) / 1.2 * factor for run, factor in zip(runs, (0.6, 1.7), strict=True)]
    odd = [
        run.model_copy(update={"measured": run.measured.model_copy(update={"step_time_s": time})})
        for run, time in zip(runs, times, strict=True)
    ]
    assert any("no common cause" in warning for warning in calibrate(records(*odd)).warnings)
    assert not any("no common cause" in warning for warning in calibrate(records(*runs)).warnings)


def test_unknown_framework() -> None:
    """That the framework was never measured is said, and widens the range."""
    known, unknown = (measured_run("a", run__framework=name) for name in ("megatron-lm", "ourselves"))
    assert any("ourselves is outside measured experience" in text for text in calibrate(records(unknown)).warnings)
    assert not any("outside measured experience" in text for text in calibrate(records(known)).warnings)
    ends = scored([unknown])[0].prediction.step_time_range_s
    step = scored([unknown])[0].prediction.step_time_s
    plain = scored([known])[0].prediction
    assert ends is not None
    assert step is not None
    assert plain.step_time_range_s is not None
    assert plain.step_time_s is not None
    assert ends[1] / step >= plain.step_time_range_s[1] / plain.step_time_s


def test_repeats_within_noise_are_one_configuration() -> None:
    """Two runs of one configuration count once for what can be fitted, and both are shown."""
    result = calibrate(records(measured_run("a"), measured_run("b", measured__step_time_s=3.1)))
    assert [factor.name for factor in result.profile.fitted] == ["speed"]
    assert [run.id for run in result.profile.runs] == ["a", "b"]


def _layouts(count: int) -> list[MeasuredRun]:
    """Different configurations with times near the prediction."""
    changes: list[dict[str, Any]] = [
        {"run__tp": 1, "run__dp": 16},
        {"run__tp": 2},
        {"run__tp": 4, "run__dp": 4},
        {"run__tp": 8, "run__dp": 2},
        {"run__micro_batch": 2},
        {"run__recompute": "full"},
    ]
    runs = [measured_run(f"lab/{index}", **change) for index, change in enumerate(changes[:count])]
    times = [row.prediction.step_time_s or 0.0 for row in scored(runs)]
    return [
        run.model_copy(update={"measured": run.measured.model_copy(update={"step_time_s": 1.2 * time})})
        for run, time in zip(runs, times, strict=True)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_what_is_fitted(count: int) -> None:
    """More runs, more factors; what is missing is said with the number of runs it takes."""
    result = calibrate(records(*_layouts(count)))
    fitted = {factor.name for factor in result.profile.fitted}
    assert fitted == {knob.name for knob in KNOBS if knob.runs <= count}
    waiting = {knob.name for knob in KNOBS} - fitted
    assert waiting | {"memory"} == {sentence.split(" (")[0] for sentence in result.not_fitted}
    assert result.median_before == pytest.approx(1 / 6, abs=0.001)
    assert result.median_after < 0.01
    assert (result.median_left_out is None) == (count == 1)


def test_memory() -> None:
    """A memory figure fits the memory factor and nothing else."""
    plain = measured_run("a", measured__step_time_s=None)
    (row,) = scored([plain])
    step, memory = row.prediction.step_time_s, row.prediction.peak_memory_bytes
    assert step is not None
    assert memory is not None
    run = measured_run("a", measured__step_time_s=step, measured__peak_mem_gib=1.3 * memory / 2**30)
    result = calibrate(records(run))
    assert result.profile.memory_factor == pytest.approx(1.3, rel=0.02)
    assert result.profile.factors["gemm_share"] == pytest.approx(1.0, abs=0.01)
    (shown,) = result.profile.runs
    assert shown.memory_error_before == pytest.approx(1 / 1.3 - 1, abs=0.001)
    assert shown.memory_error_after == pytest.approx(0.0, abs=0.02)
    (again,) = scored([run], result.profile)
    assert again.memory_error == pytest.approx(shown.memory_error_after, abs=1e-4)


def test_outlier_does_not_decide() -> None:
    """One run at twice its time among five moves the speed by little."""
    runs = _layouts(5)
    bad = runs[4].measured.model_copy(update={"step_time_s": 2.5 * (runs[4].measured.step_time_s or 0.0)})
    runs[4] = runs[4].model_copy(update={"measured": bad})
    factors = {factor.name: factor.factor for factor in calibrate(records(*runs)).profile.fitted}
    assert factors["speed"] == pytest.approx(1 / 1.2, rel=0.05)


def test_profile_counts_on_its_accelerator_only() -> None:
    """Runs of another accelerator are predicted with the published constants."""
    profile = calibrate(records(*_layouts(1))).profile
    runs = [measured_run("a"), measured_run("b", hardware__gpu="a100")]
    before, after = scored(runs), scored(runs, profile)
    assert before[1].prediction == after[1].prediction
    assert before[0].prediction.step_time_s != after[0].prediction.step_time_s


@pytest.mark.parametrize("name", list(SETS)[:5])
def test_one_run_of_an_unseen_framework(name: str) -> None:
    """With one run of it, the others are predicted clearly better: the typical error falls by a third and more."""
    found = transfer(name, public_records().runs)
    assert found.runs >= 6
    assert found.after < 0.67 * found.before


def test_no_published_run_is_called_impossible() -> None:
    """The limits that physics sets leave every source alone, and refuse what is a little beyond them."""
    found = set()
    for run in public_runs()[::40]:
        try:
            check_usable(run)
        except InputError as problem:
            found.add(problem.where)
    assert not found & {"measured.step_time_s", "measured.peak_mem_gib"}
    for field, run in {
        "measured.step_time_s": measured_run(measured__step_time_s=0.6),
        "measured.peak_mem_gib": measured_run(measured__peak_mem_gib=90.0),
    }.items():
        with pytest.raises(InputError) as refused:
            check_usable(run)
        assert refused.value.where == field
        assert refused.value.hint


def test_packed_samples_attend_among_themselves_only() -> None:
    """The least time of a step counts what attends: a time that whole sequences would rule out is possible for packed
    ones, and one that no packing explains is refused for both."""

    def refused(seconds: float, **extra: Any) -> bool:
        run = measured_run(model__seq_len=131_072, measured__step_time_s=seconds, run__extra=extra)
        try:
            check_usable(run)
        except InputError as problem:
            return "is so fast" in problem.message
        return False

    packed = {"features": {"sequence_packing": True}}
    # 6 x 8.03e9 x 64 x 131,072 FLOPs at 16 x 989e12 x 1.05 per second are 24.3 s; attention adds more than twice that.
    assert refused(40.0)
    assert not refused(40.0, **packed)
    assert refused(20.0)
    assert refused(20.0, **packed)
