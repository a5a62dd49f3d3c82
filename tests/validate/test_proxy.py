"""One rank of a larger plan alone: collectives that copy, measured work, and the step put together from both."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import MissingExtraError
from planner.service import StrategyInput
from planner.specs.plan import PlanDocument
from planner_validate.runs import proxy
from planner_validate.runs.devices import Machine
from planner_validate.runs.options import Options
from planner_validate.runs.plans import prepared
from tests.validate.test_memory_only import SMALL, WIDE, plan

torch = pytest.importorskip("torch", reason="a rank runs with torch")
pytestmark = pytest.mark.torch


def on_processors(folder: Path, gpus: int, strategy: StrategyInput) -> PlanDocument:
    """A plan of the small model for processors."""
    return plan(folder, SMALL, gpus, strategy, gpu="cpu", seq_len=128, precision="fp32")


def test_a_step_of_measured_and_modelled_parts(tmp_path: Path) -> None:
    """Twice the predicted work doubles the bubble and leaves the traffic; the parts sum to the step."""
    found = prepared(plan(tmp_path, WIDE, 64, StrategyInput(tp=4, pp=4, zero_stage=3)), Options())
    tree = found.estimate.time
    exact = proxy.parts_of(tree, 0.0, 0.0)
    same = proxy.parts_of(tree, exact.predicted_work_s, 0.1)
    double = proxy.parts_of(tree, 2 * exact.predicted_work_s, 0.1)
    assert same.bubble_s == pytest.approx(same.predicted_bubble_s)
    assert double.bubble_s == pytest.approx(2 * same.bubble_s)
    assert double.traffic_s == same.traffic_s
    assert set(same.traffic_s) == {"tp", "dp", "pp"}
    assert double.total_s - same.total_s == pytest.approx(exact.predicted_work_s + same.bubble_s)
    predicted = {child.name: child.value for child in tree.children}
    rest = predicted["optimizer"] + predicted["once a step"]
    assert same.total_s - 0.1 + rest == pytest.approx(found.estimate.step_time_s)


def test_the_slowest_stage_is_chosen(tmp_path: Path) -> None:
    """The rank belongs to the stage that the time tree names."""
    found = prepared(plan(tmp_path, WIDE, 64, StrategyInput(tp=4, pp=4, zero_stage=3)), Options())
    named = next(part.name for part in found.estimate.time.children if part.name.startswith("stage "))
    stage = int(named.split()[1])
    assert proxy.slowest_rank(found.document.best.strategy, found.estimate) == stage * 16


def test_no_gpu(tmp_path: Path) -> None:
    """Exit code 6, with what works here."""
    document = plan(tmp_path, WIDE, 8, StrategyInput(zero_stage=3))
    with pytest.raises(MissingExtraError, match="no GPU here") as caught:
        proxy.run(document, Options(), None, probe=lambda: Machine(torch="2.13.0"))
    assert "--memory-only" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("gpus", "strategy", "kinds"),
    [
        (4, StrategyInput(zero_stage=3), {"dp"}),
        (8, StrategyInput(tp=2, pp=2, zero_stage=2), {"tp", "dp", "pp"}),
        (4, StrategyInput(cp=2, zero_stage=3), {"cp", "dp"}),
    ],
    ids=["sharded", "tensor-pipeline", "context"],
)
def test_a_rank_of_a_larger_plan(gpus: int, strategy: StrategyInput, kinds: set[str], tmp_path: Path) -> None:
    """One process trains what a rank of four or eight would; its memory is that of its stage."""
    told: list[str] = []
    made = proxy.run(on_processors(tmp_path, gpus, strategy), Options(), told.append)
    assert made.failures == ()
    assert made.mode == "proxy"
    (rank,) = made.ranks
    assert rank.world_size == gpus
    assert len(rank.steps) == Options().measured_steps
    assert made.step_time is not None
    assert made.step_time.origin == "modelled"
    assert made.step_time.measured == pytest.approx(sum(term.measured or 0.0 for term in made.time_terms))
    measured = {term.name for term in made.time_terms if term.origin == "measured"}
    assert measured == {proxy.WORK, "optimizer"}
    assert {f"{kind} traffic" for kind in kinds} <= {term.name for term in made.time_terms}
    assert made.losses == ()
    assert made.peak_memory is not None
    assert made.peak_memory.error == pytest.approx(0.0, abs=0.10)
    assert any("alone on one device" in note for note in made.notes)
    assert told[0].startswith("running rank")


def test_collectives_are_copies() -> None:
    """Sizes as among all ranks, values finite, this rank's part where it belongs; nothing waits."""
    from planner_validate.trainer import loopback

    group = loopback.Loopback(1, 4)
    own = torch.arange(6.0)
    whole = torch.full((24,), float("nan"))
    group.all_gather_single(whole, own)
    assert torch.equal(whole, own.repeat(4))
    inside = torch.arange(24.0)
    group.all_gather_single(inside, inside[6:12])
    assert torch.equal(inside, torch.arange(6.0, 12.0).repeat(4))
    part = torch.full((6,), float("nan"))
    group.reduce_scatter_single(part, whole)
    assert torch.equal(part, own)
    received = torch.full((7, 2), float("nan"))
    group.all_to_all_single(received, torch.ones(3, 2))
    assert torch.equal(received, torch.ones(7, 2))
    arrived = torch.full((5,), float("nan"), requires_grad=True)
    group.recv([arrived], 0, 0)
    assert bool(torch.isfinite(arrived).all())
    group.allreduce([own]).wait()
    assert torch.equal(own, torch.arange(6.0))
