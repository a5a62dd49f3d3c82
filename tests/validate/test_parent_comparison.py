"""Measurements beside predictions: terms that add up, the verdict, and the suspect that the evidence points at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from planner.specs.validation import (
    CollectiveUse,
    GradientCheck,
    MemoryTerm,
    RankFailure,
    RankResult,
    StepMeasure,
    ValidationReport,
)
from planner_validate.reports.comparison import report, spread, step_times
from planner_validate.reports.terms import (
    allocated,
    phase_of,
    predicted_memory,
    predicted_times,
    predicted_traffic,
    reserved,
)
from tests.validate.runs import LAYOUTS, as_predicted, found_for


def changed(results: Sequence[RankResult], change: Callable[[StepMeasure], StepMeasure]) -> list[RankResult]:
    """The same results with other steps."""
    return [each.model_copy(update={"steps": tuple(map(change, each.steps))}) for each in results]


def scaled(**factors: float) -> Callable[[StepMeasure], StepMeasure]:
    """Steps with fields times a factor."""
    return lambda step: step.model_copy(update={name: getattr(step, name) * by for name, by in factors.items()})


def told(found: ValidationReport) -> str:
    return " | ".join(found.suspects)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_add_up_to_the_estimate(layout: str) -> None:
    """Every part of both trees is in exactly one term, whatever the layout."""
    found = found_for(layout)
    for stage in found.estimate.memory.children:
        for phase in stage.children:
            context = sum(part.value for part in phase.children if part.name == "context and communication buffers")
            assert reserved(phase) + context == pytest.approx(phase.value)
            assert allocated(phase) == pytest.approx(sum(predicted_memory(phase).values()))
    assert sum(predicted_times(found.estimate.time).values()) == pytest.approx(found.estimate.step_time_s)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [("plain", {"dp"}), ("tensor", {"tp", "dp"}), ("stages", {"pp", "dp"}), ("experts", {"ep", "dp"})],
)
def test_traffic_by_group(layout: str, kinds: set[str]) -> None:
    """A layout waits for the groups that it has and for no others."""
    assert set(predicted_traffic(found_for(layout).estimate.time)) == kinds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_predicted(layout: str) -> None:
    """A run that measures what was predicted is within, without suspects, and every term has error 0."""
    found = found_for(layout)
    made = report(found, as_predicted(found))
    assert made.verdict == "within"
    assert made.suspects == ()
    assert made.step_time is not None
    assert made.peak_memory is not None
    for each in (made.step_time, made.peak_memory, *made.memory_terms):
        assert each.error == pytest.approx(0.0, abs=1e-4)
    assert [term.name for term in made.time_terms[:2]] == ["forward and backward", "optimizer"]


@pytest.mark.parametrize(("slower", "place"), [(3.0, "instead of"), (0.3, "faster")])
def test_outside_names_the_largest_part(slower: float, place: str) -> None:
    """Far from the prediction the run is outside, and the part that makes the gap is named before calibration."""
    found = found_for()
    made = report(found, as_predicted(found, slower=slower))
    assert made.verdict == "outside"
    assert "forward and backward" in made.suspects[0]
    assert place in made.suspects[0]
    assert "calibrate --on-this-machine" in made.suspects[1]
    assert made.step_time is not None
    assert made.step_time.suspect == made.suspects[0]


def test_a_slow_update_is_told_from_slow_kernels() -> None:
    found = found_for()
    extra = found.estimate.step_time_s
    results = changed(
        as_predicted(found),
        lambda step: step.model_copy(
            update={"seconds": step.seconds + extra, "optimizer_s": step.optimizer_s + extra},
        ),
    )
    assert report(found, results).suspects[0].startswith("optimizer takes")


def test_time_between_the_parts() -> None:
    """What is neither forward, backward nor update is a part of its own, and a suspect."""
    found = found_for()
    made = report(found, changed(as_predicted(found), scaled(seconds=3.0)))
    assert "between" in [term.name for term in made.time_terms]
    assert made.suspects[0].startswith("between takes")


def test_slow_links_are_told_from_slow_kernels() -> None:
    """Where the collectives were timed and make the gap, their group is named."""
    found = found_for("tensor")
    waits = predicted_traffic(found.estimate.time)
    extra = 2.0 * found.estimate.step_time_s
    use = CollectiveUse(operation="all_reduce", group="tp", calls=9, sent_bytes=9, seconds=waits["tp"] + extra)
    results = [
        each.model_copy(update={"collectives": (use,)})
        for each in changed(
            as_predicted(found),
            lambda step: step.model_copy(
                update={
                    "seconds": step.seconds + extra,
                    "forward_backward_s": step.forward_backward_s + extra,
                }
            ),
        )
    ]
    assert report(found, results).suspects[0].startswith("tensor-parallel traffic takes")
    quick = [
        each.model_copy(update={"collectives": (use.model_copy(update={"seconds": waits["tp"]}),)}) for each in results
    ]
    assert report(found, quick).suspects[0].startswith("forward and backward takes")


def test_an_unsteady_machine_is_the_first_suspect() -> None:
    found = found_for()
    noisy = [
        each.model_copy(
            update={
                "steps": tuple(
                    step.model_copy(update={"seconds": step.seconds * factor, "forward_backward_s": step.seconds})
                    for step, factor in zip(each.steps, (1.0, 9.0, 3.0, 4.0, 2.0), strict=True)
                )
            }
        )
        for each in as_predicted(found)
    ]
    assert "not steady" in report(found, noisy).suspects[0]


@pytest.mark.parametrize("term", ["weights", "gradients", "optimizer", "activations", "buffers"])
@pytest.mark.parametrize("factor", [1.0, -0.5], ids=["more", "less"])
def test_the_term_that_makes_a_memory_gap(term: MemoryTerm, factor: float) -> None:
    """Memory outside its range names the term that differs, not the largest one."""
    found = found_for()
    results = as_predicted(found)
    peak = results[0].peak_allocated_bytes or 0
    size = round(factor * peak)
    moved = [
        each.model_copy(
            update={
                "peak_allocated_bytes": peak + size,
                "memory": {**each.memory, term: max(0, each.memory[term] + size)},
            }
        )
        for each in results
    ]
    made = report(found, moved)
    assert made.verdict == "outside"
    assert f"peak memory: {term} explain" in told(made)


def test_memory_of_the_fullest_rank_against_its_own_stage() -> None:
    """Of a pipeline the terms are compared with the stage of the rank that holds most."""
    found = found_for("uneven")
    results = as_predicted(found)
    last = results[-1].model_copy(update={"peak_allocated_bytes": 1 << 30})
    made = report(found, [*results[:-1], last])
    assert made.peak_memory is not None
    assert "rank 3" in made.peak_memory.name
    expected = predicted_memory(phase_of(found.estimate.memory.children[1]))
    assert {term.name: term.predicted for term in made.memory_terms} == pytest.approx(
        {name: size for name, size in expected.items() if size}
    )


def test_reserved_memory_is_compared_with_reserved_memory() -> None:
    """On GPUs the allocator's own share is on both sides."""
    found = found_for(gpu="h100")
    phase = max((phase_of(stage) for stage in found.estimate.memory.children), key=reserved)
    results = [each.model_copy(update={"peak_reserved_bytes": round(reserved(phase))}) for each in as_predicted(found)]
    made = report(found, results)
    assert made.peak_memory is not None
    assert "reserved" in made.peak_memory.name
    assert made.peak_memory.error == pytest.approx(0.0, abs=1e-4)
    assert reserved(phase) > allocated(phase)


def test_wrong_training_fails_whatever_its_speed() -> None:
    """Gradients that differ, a loss that rises and one that is no number fail a run that is fast enough."""
    found = found_for()
    results = as_predicted(found)
    wrong = GradientCheck(
        parameters=9, largest_relative_error=0.3, worst_parameter="head.weight", gradient_norm=1.0, reference_norm=2.0
    )
    differs = [results[0].model_copy(update={"gradients": wrong}), *results[1:]]
    rises = changed(results, lambda step: step.model_copy(update={"loss": 9.0 - (step.loss or 0.0)}))
    nothing = changed(results, lambda step: step.model_copy(update={"loss": None}))
    for bad, words in ((differs, "head.weight"), (rises, "does not fall"), (nothing, "not finite")):
        made = report(found, bad)
        assert made.verdict == "failed"
        assert words in made.suspects[0]


def test_a_rank_that_is_missing() -> None:
    """Without all ranks there is no step time, and the run has failed."""
    found = found_for()
    failure = RankFailure(rank=3, kind="killed", phase="step 2", message="gone")
    made = report(found, as_predicted(found)[:3], [failure])
    assert made.verdict == "failed"
    assert made.step_time is None
    assert made.failures == (failure,)


def test_nothing_measured_is_a_failure() -> None:
    found = found_for()
    assert report(found, []).verdict == "failed"


def step(seconds: float, body: float, update: float) -> StepMeasure:
    return StepMeasure(seconds=seconds, forward_backward_s=body, optimizer_s=update)


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    """The last rank to reach the update tells how long the update takes; the others wait there."""
    ranks = [
        RankResult(rank=0, world_size=2, steps=(step(1.0, 0.5, 0.45), step(2.0, 1.9, 0.05))),
        RankResult(rank=1, world_size=2, steps=(step(1.1, 0.9, 0.05), step(1.9, 0.4, 1.5))),
    ]
    times = step_times(ranks)
    assert times is not None
    assert times.seconds == (1.1, 2.0)
    assert times.optimizer_s == (0.05, 0.05)
    assert times.between_s == pytest.approx((0.15, 0.05))
    assert step_times([]) is None
    assert step_times([ranks[0], RankResult(rank=1, world_size=2)]) is None


def test_spread() -> None:
    """Half of the interquartile range over the median; one outlier in five does not move it."""
    assert spread([1.0, 1.0, 1.0, 1.0, 1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.0 / 3.0)
    assert spread([1.0, 1.0, 1.0, 1.0, 99.0]) == 0.0
    assert spread([1.0, 2.0]) is None
