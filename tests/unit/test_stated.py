"""Settings in another form than expected: free-form ones count as not stated, words that mean nothing are a reason."""

from __future__ import annotations

from typing import Any

import pytest

from planner.accuracy.comparison.report import scored
from planner.accuracy.predict import Prediction, cases_of, predict
from planner.accuracy.runs.stated import settings
from planner.specs.numbers import degree, number
from tests.accuracy_records import measured_run

ODD: dict[str, Any] = {
    "null": None, "flag": True, "number": 3, "negative": -1, "text": "x", "list": [1], "nested": [[]], "empty": {},
    "other": {"a": 1}, "huge": 10**30, "long": "9" * 5000, "infinite": "inf", "none": "",
}  # fmt: skip


def predicted(**changes: Any) -> Prediction:
    (row,) = scored([measured_run(**changes)])
    return row.prediction


def test_number() -> None:
    """Finite numbers and their text; flags are none."""
    assert [number(value) for value in (1, 0.5, "2.5", "-1")] == [1.0, 0.5, 2.5, -1.0]
    odd: list[object] = [True, None, "x", "", "nan", "inf", [1], {}, 10**400, "9" * 5000]
    assert [number(value) for value in odd] == [None] * len(odd)


def test_degree() -> None:
    """Whole positive numbers of a plausible size."""
    assert [degree(value) for value in (4, "4", 4.0)] == [4, 4, 4]
    assert [degree(value) for value in (0, -1, 1.5, True, 10**30, "x", None)] == [None] * 7


def test_settings() -> None:
    """A group, or nothing."""
    run = measured_run(run__extra={"args": {"a": 1}, "recipe": [1]}).run
    assert settings(run, "args") == {"a": 1}
    assert [settings(run, name) for name in ("recipe", "absent")] == [{}, {}]


GROUPS = ("args", "recipe", "recipe_settings", "features")
ARGUMENTS = (
    "num-distributed-optimizer-instances",
    "microbatch-group-size-per-virtual-pipeline-stage",
    "hidden-dropout",
)
MIXTURE = {"model__moe": {"experts": 8, "top_k": 2, "expert_ffn": 14336}, "run__ep": 8}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_free_form(value: Any) -> None:
    """Whatever stands there, the record is priced; what cannot be read counts as absent."""
    for name in GROUPS:
        for changes in ({}, MIXTURE):
            assert predicted(run__extra={name: value}, **changes).skipped is None
    assert predicted(run__extra={"recipe": {"settings": value}}, **MIXTURE).skipped is None
    plain = predicted(run__extra={"args": {}})
    for name in ARGUMENTS:
        odd = predicted(run__extra={"args": {name: value}})
        assert odd.skipped is None
        if number(value) is None:
            assert odd == plain


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run__recompute": "full:every-0th-layer"}, "unknown recomputation 'full:every-0th-layer'"),
        ({"run__recompute": "yes"}, "unknown recomputation 'yes'"),
        ({"run__offload": "optimizer, fraction 2.5"}, "unknown share of offloading 'optimizer, fraction 2.5'"),
        ({"run__offload": "optimizer, fraction 1.2.3"}, "unknown share of offloading 'optimizer, fraction 1.2.3'"),
        ({"run__offload": "optimizer, fraction ..."}, "unknown share of offloading 'optimizer, fraction ...'"),
        ({"hardware__inter": "0x400Gb IB"}, "inconsistent machines: nics_per_node: input should be greater than"),
        ({"model__kv_heads": 7}, "inconsistent model: heads(32) % kv_heads(7) = 4, must be 0"),
        ({"model__hidden": 10_000_000}, "inconsistent model: hidden: input should be less than"),
    ],
)
def test_reason(changes: dict[str, Any], reason: str) -> None:
    """What cannot be meant is named with its words."""
    assert (predicted(**changes).skipped or "").startswith(reason)


def test_recomputed_layers() -> None:
    """ "full:N-layers" recomputes N layers of a stage: none of them is no recomputation, more than there are is all."""
    kinds = ("none", "full:0-layers", "full:16-layers", "full", "full:32-layers", "full:99999999999999999999-layers")
    times = [predicted(run__recompute=words).step_time_s or 0.0 for words in kinds]
    assert times[0] == times[1] < times[2] < times[3] == times[4] == times[5]


def test_offloaded_layers() -> None:
    """Activations of more layers than there are is activations of all."""
    words = [f"activations of {layers} layers to CPU" for layers in ("32", "99999999999999999999")]
    assert len({predicted(run__offload=text, run__recompute="none").step_time_s for text in words}) == 1


@pytest.mark.parametrize(
    ("words", "same"), [("bfloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("float32", "fp32")]
)
def test_precision_words(words: str, same: str) -> None:
    """The names that frameworks use."""
    assert predicted(run__precision=words).step_time_s == predicted(run__precision=same).step_time_s


def test_no_figure_is_negative() -> None:
    """A whole optimizer on the host leaves memory that is needed."""
    cases, _ = cases_of([measured_run(run__offload="optimizer, fraction 1.0")])
    (prediction,) = predict(cases)
    assert (prediction.peak_memory_bytes or 0.0) > 0
