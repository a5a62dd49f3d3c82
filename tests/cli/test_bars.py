"""Bars of memory and time: complete, scaled to the limit, merged where stages are alike, never wider than asked."""

from __future__ import annotations

import pytest

from planner.cli.bars import COLOURS, bar_width, memory_lines, time_lines
from planner.service import ClusterInput, JobInput, StrategyInput, estimate
from planner.service.parts import MEMORY_TERMS, memory_term, term_bytes, time_parts
from planner.service.why import largest_loss
from planner.specs.plan import Breakdown, Plan

CLUSTER = ClusterInput(gpu="h100", gpus=64)
JOB = JobInput(seq_len=4096, global_batch=256)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A pipeline of eight stages."""
    return estimate("llama-3.1-70b", CLUSTER, JOB, StrategyInput(tp=8, pp=8)).best


def test_categories_hold_the_whole_stage(plan: Plan) -> None:
    """The categories of a stage add up to its memory."""
    for stage in plan.estimate.memory.children:
        assert sum(term_bytes(stage)) == pytest.approx(stage.value)


def test_time_parts_hold_the_whole_step(plan: Plan) -> None:
    """The parts of a step add up to it."""
    assert sum(time_parts(plan).values()) == pytest.approx(plan.estimate.step_time_s)


def test_every_stage_has_a_row_of_its_size(plan: Plan) -> None:
    """A full bar is the memory limit; the first stage holds the most micro-batches and has the longest bar."""
    lines = [line.plain for line in memory_lines(plan.estimate, 100)]
    bars = [line[line.index("[") + 1 : line.index("]")] for line in lines if "[" in line]
    filled = [len(bar.rstrip(".")) for bar in bars]
    assert filled[0] == max(filled)
    first = plan.estimate.memory.children[0].value
    assert filled[0] == pytest.approx(len(bars[0]) * first / plan.estimate.memory_limit_bytes, abs=1)


def test_equal_stages_are_merged(plan: Plan) -> None:
    """Stages of the same make become one row that names the first and the last."""
    stage = plan.estimate.memory.children[0]
    tree = Breakdown(
        name="peak memory",
        value=stage.value,
        combine="max",
        children=tuple(stage.model_copy(update={"name": f"stage {i}"}) for i in range(6)),
    )
    lines = memory_lines(plan.estimate.model_copy(update={"memory": tree}), 100)
    assert [line.plain.strip().split("  [")[0] for line in lines if "[" in line.plain] == ["stage 0 to 5"]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_rows_fit_the_terminal(plan: Plan, columns: int) -> None:
    """No row with a bar is wider than the terminal."""
    for line in [*memory_lines(plan.estimate, columns), *time_lines(plan, columns)]:
        if "[" in line.plain:
            assert len(line.plain) <= columns


def test_bar_width_has_bounds() -> None:
    """Bars neither vanish nor grow without end."""
    assert bar_width(20, 40) == 10
    assert bar_width(1000, 40) == 44


def test_unknown_components_are_overhead() -> None:
    """A component that no category names is counted as overhead, not lost."""
    assert MEMORY_TERMS[memory_term("something new")].name == "overhead"
    assert MEMORY_TERMS[memory_term("weights")].name == "weights"


def test_every_term_has_a_letter_of_its_own() -> None:
    """Terms are told apart without colour."""
    assert len({term.letter for term in MEMORY_TERMS}) == len(MEMORY_TERMS) == len(set(COLOURS))


def test_largest_loss() -> None:
    """Without parallelism nothing but arithmetic counts; with tp across nodes it is tensor-parallel traffic."""
    alone = estimate("llama-3.1-8b", ClusterInput(gpu="h100", gpus=1), JOB, StrategyInput(recompute="none")).best
    assert largest_loss(alone)[0] in ("none", "launches")
    wide = estimate("llama-3.1-8b", ClusterInput(gpu="h100", gpus=32), JOB, StrategyInput(tp=32)).best
    assert largest_loss(wide)[0] == "TP traffic"
