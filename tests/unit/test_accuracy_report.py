"""Classes, exclusions and figures of the comparison, against an independent scoring of the same predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.accuracy.comparison.classes import class_of_run, excluded_from_time
from planner.accuracy.comparison.report import Scored, errors_of, paired, report, scored
from planner.accuracy.predict import Prediction
from planner.accuracy.runs.records import Records, public_records
from planner.specs.accuracy import AccuracyDocument, Errors, Grouping
from planner.specs.measurement import Measured
from planner.units import GIB
from tests.accuracy_records import made_up_prediction, measured_run

EXPECTED = Path(__file__).parents[1] / "data" / "accuracy" / "expected_scores.json"
"""What the scoring script that accompanies the records says of predictions made up by tests/accuracy_records.py."""

CLASSES: list[tuple[str, dict[str, Any]]] = [
    ("megatron dense 16-bit", {}),
    ("megatron dense 16-bit, recompute unknown", {"run__recompute": None}),
    ("megatron dense 8/4-bit", {"run__precision": "mxfp8", "run__framework": "nemo"}),
    ("megatron moe 16-bit", {"model__moe": {"experts": 8, "top_k": 2, "expert_ffn": 64}}),
    ("megatron moe 8/4-bit", {"model__moe": {"experts": 8}, "run__precision": "nvfp4"}),
    ("fsdp 16-bit", {"run__framework": "torchtitan"}),
    ("fsdp 8/4-bit", {"run__framework": "llm-foundry", "run__precision": "fp8-ds"}),
    ("lora", {"run__extra": {"task": "sft lora"}, "run__framework": "nanotron"}),
    ("nanotron usual layouts", {"run__framework": "nanotron"}),
    ("nanotron odd layouts", {"run__framework": "nanotron", "run__pp": 2}),
    ("nanotron odd layouts", {"run__framework": "nanotron", "run__tp": None}),
    ("nanotron usual layouts", {"run__framework": "nanotron", "run__pp": 2, "hardware__gpus": 8}),
    ("aleph alpha", {"run__framework": "aleph-alpha-scaling"}),
    ("other", {"run__framework": None}),
]


@pytest.mark.parametrize(("name", "changes"), CLASSES)
def test_class(name: str, changes: dict[str, Any]) -> None:
    """The class follows from framework, precision, experts, task and layout."""
    assert class_of_run(measured_run(**changes)) == name


EXCLUDED: list[dict[str, Any]] = [
    {"run__extra": {"task": "ci-test"}},
    {"run__extra": {"task": "single layer"}},
    {"run__framework": "nanotron", "run__global_batch": None},
    {"run__framework": "nanotron", "hardware__gpus": 256},
    {"run__extra": {"task": "lora"}, "run__recompute": None},
]


@pytest.mark.parametrize("changes", EXCLUDED)
def test_excluded(changes: dict[str, Any]) -> None:
    """Rows that are no steady training step are left out with a reason, others are not."""
    assert excluded_from_time(measured_run(**changes))
    assert excluded_from_time(measured_run("nanotron-old/x"))
    assert excluded_from_time(measured_run()) is None


@pytest.fixture(scope="module")
def made_up() -> AccuracyDocument:
    """The public records with made-up predictions."""
    records = public_records()
    rows = paired(records.runs, [made_up_prediction(run) for run in records.runs], [])
    return report(rows, records, name="made up")


def _figures(errors: Errors | None, skipped: int | None) -> dict[str, Any]:
    assert errors is not None
    figures = {name: round(getattr(errors, name), 4) for name in ("median", "p90", "bias")}
    return {"n": errors.rows, "skipped": skipped, **figures}


def test_figures_equal_an_independent_scoring(made_up: AccuracyDocument) -> None:
    """Class by class: rows, skipped, median, 90th percentile and mean; fit; ranking."""
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    time = {row.group: _figures(row.errors, row.skipped) for row in made_up.step_time if row.group != "all"}
    memory = {row.group: _figures(row.errors, None) for row in made_up.memory if row.kind == "any"}
    memory.pop("all")
    assert time == expected["time"]
    assert memory == expected["memory"]
    fit = next(row for row in made_up.fit if row.group == "all")
    assert {
        "oom: said it fits": fit.oom_said_fits,
        "oom: said it does not": fit.oom_said_not,
        "ran: said it fits": fit.ran_said_fits,
        "ran: said it does not": fit.ran_said_not,
    } == expected["fit"]
    ranking = made_up.ranking
    assert ranking is not None
    assert {
        "groups": ranking.sweeps,
        "regret_mean": round(ranking.regret_mean, 4),
        "regret_median": round(ranking.regret_median, 4),
        "top3_regret_mean": round(ranking.top3_regret_mean, 4),
        "regret_max": round(ranking.regret_max, 4),
        "spearman_median": round(ranking.spearman_median, 4),
    } == expected["ranking"]


def test_errors_of() -> None:
    """Median and 90th percentile of the sizes, mean with the sign."""
    errors = errors_of([-0.4, 0.1, 0.2])
    assert errors.rows == 3
    assert errors.median == 0.2
    assert errors.p90 == 0.4
    assert errors.bias == pytest.approx(-0.033333)


def _rows(times: list[tuple[float, float]], **changes: Any) -> list[Scored]:
    """Rows with (measured, predicted) step time."""
    runs = [measured_run(f"nanotron/{i}", measured__step_time_s=m, **changes) for i, (m, _) in enumerate(times)]
    predictions = [Prediction(run.id, p, None, True) for run, (_, p) in zip(runs, times, strict=True)]
    return paired(runs, predictions, [])


def test_ranking() -> None:
    """The layout predicted fastest is compared with the fastest; the best of three with it as well."""
    times = [(1.1, 1.0), (1.0, 2.0), *((float(i), float(i)) for i in range(3, 11))]
    (sweep,) = report(_rows(times), Records(), name="x").sweeps
    assert sweep.grid
    assert (sweep.rows, sweep.regret, sweep.top3_regret) == (10, 0.1, 0.0)
    assert sweep.spearman == pytest.approx(1 - 6 * 2 / (10 * 99), abs=1e-6)
    assert report(_rows(times[:9]), Records(), name="x").sweeps == ()
    constant = report(_rows([(1.0, float(i)) for i in range(10)]), Records(), name="x")
    assert constant.sweeps[0].spearman == 0.0


def test_other_tables_are_ranked_apart() -> None:
    """Rows of a source without a grid count only where machine and software are the same, and not in the summary."""
    runs = [measured_run(f"lab/{i}", run__version=str(i % 2)) for i in range(30)]
    document = report(paired(runs, [Prediction(run.id, 1.0, None, True) for run in runs], []), Records(), name="x")
    assert [(sweep.rows, sweep.grid) for sweep in document.sweeps] == [(15, False), (15, False)]
    assert document.ranking is None


def test_priced_and_skipped() -> None:
    """Real predictions: the kind of memory figure, settings that were assumed, and reasons of what is not priced."""
    runs = [
        measured_run("a", measured__peak_mem_gib=40.0, measured__peak_mem_kind="nvidia-smi"),
        measured_run("b", run__recompute=None, measured__peak_mem_gib=30.0),
        measured_run("c", hardware__gpu="h1000"),
        measured_run("d", run__dp=3),
        measured_run("e", measured__oom=True, measured__step_time_s=None),
    ]
    document = report(scored(runs), Records(runs=runs), name="x", by="gpu")
    assert (document.read, document.priced) == (5, 3)
    assert {row.id: row.reason for row in document.not_priced} == {
        "c": "unknown GPU 'h1000'",
        "d": "tp * pp * cp * dp is not the number of GPUs",
    }
    by_gpu = {row.group: row for row in document.step_time}
    assert set(by_gpu) == {"h100-sxm-80gb", "h1000", "all"}
    assert by_gpu["h100-sxm-80gb"].assumed == 0.5
    assert by_gpu["h100-sxm-80gb"].skipped == 1
    assert by_gpu["h1000"].errors is None
    assert {(row.kind, row.errors.rows) for row in document.memory if row.group == "all"} == {
        ("any", 2), ("allocated", 1), ("device", 1),
    }  # fmt: skip
    fit = next(row for row in document.fit if row.group == "all")
    assert fit.ran_said_fits + fit.ran_said_not == 2
    assert fit.oom_said_fits + fit.oom_said_not == 1
    assert json.dumps(document.to_json_dict(), allow_nan=False)


def test_step_time_without_a_batch_is_not_lost() -> None:
    """A time that cannot be compared, because nobody says what a step is, is counted with the reason."""
    runs = [measured_run("a"), measured_run("b", run__global_batch=None)]
    document = report(scored(runs), Records(runs=runs), name="x")
    assert document.step_time[-1].errors is not None
    assert document.step_time[-1].errors.rows == 1
    assert document.excluded == {"global batch not stated, so no whole step can be predicted": 1}


def test_words_in_other_spelling() -> None:
    """Capitals and blanks do not change how a run is read."""
    same = [
        measured_run("a", run__precision="fp8-cs"),
        measured_run("a", run__framework=" Megatron-LM", run__precision="FP8-CS ", hardware__gpu=" H100 "),
    ]
    plain, odd = scored(same[:1])[0], scored(same[1:])[0]
    assert plain.prediction == odd.prediction
    assert class_of_run(plain.run) == class_of_run(odd.run) == "megatron dense 8/4-bit"


@pytest.mark.parametrize("by", ["source", "framework", "class"])
def test_groupings_hold_the_same_rows(by: Grouping) -> None:
    """Every grouping adds up to all rows."""
    rows = _rows([(1.0, 1.2), (2.0, 2.1)]) + [
        Scored(run, Prediction(run.id, 1.0, 2 * GIB, True), None, "h100") for run in (measured_run("lab/x"),)
    ]
    document = report(rows, Records(), name="x", by=by)
    *groups, whole = document.step_time
    assert whole.group == "all"
    assert sum(row.errors.rows for row in groups if row.errors) == (whole.errors.rows if whole.errors else 0) == 3


def test_every_public_reason_is_expected() -> None:
    """No public record falls to the catch-all for records whose fields do not fit together."""
    records = public_records()
    document = report(scored(records.runs), records, name="public")
    assert "its fields cannot be used together" not in document.skipped
    assert sum(document.skipped.values()) == document.read - document.priced


def test_measured_values_are_not_read() -> None:
    """A prediction is the same whatever was measured."""
    runs = public_records().runs[::40]
    kinds = [run.measured.peak_mem_kind for run in runs]
    blind = [
        run.model_copy(update={"measured": Measured(peak_mem_kind=kind)}) for run, kind in zip(runs, kinds, strict=True)
    ]
    assert [row.prediction for row in scored(runs)] == [row.prediction for row in scored(blind)]
