"""The pipeline of one step as slots of time: simulated with the stage times that the estimate is made of.

Very many micro-batches repeat themselves: their time is extrapolated from the period that the simulation settles to,
and the picture shows a run of fewer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost.context import CostContext, Work
from planner.cost.pipeline import interleaving_group
from planner.cost.schedules import BACKWARD, FORWARD, Op, Run, rank_order, simulate
from planner.cost.stage_times import stage_times
from planner.specs.batch import StrategyBatch
from planner.specs.pictures import Schedule, Slot, SlotKind, SlotPhase
from planner.specs.strategy import Schedule as ScheduleName
from planner.specs.strategy import Strategy

MOST_SLOTS = 3072
"""Drawn: one whole group of micro-batches through 16 stages of 6 chunks each."""
_SHOWN_GROUPS = 4
"""Drawn groups of micro-batches (one for each rank): enough to see warm-up, steady state and cool-down."""
MOST_SIMULATED = 24_000
"""Slots that are simulated one by one."""
_SETTLED = 4
"""Groups of micro-batches (one for each rank) after which a pipeline is taken to repeat itself."""
_KINDS: dict[str, SlotKind] = {"F": "forward", "B": "backward", "W": "weight-gradient"}


@dataclass(frozen=True)
class _Pipeline:
    """One strategy's schedule, to be run with any number of micro-batches."""

    schedule: ScheduleName
    ranks: int
    chunks: int
    group: int
    forward: list[float]
    backward: list[float]
    weight: list[float]

    @property
    def slots(self) -> int:
        """Of one micro-batch, over all ranks."""
        return (3 if self.weight else 2) * self.ranks * self.chunks

    @property
    def work_s(self) -> float:
        """Of one micro-batch, over all ranks."""
        return sum(self.forward) + sum(self.backward) + sum(self.weight)

    def run(self, micro_batches: int) -> Run:
        orders = [
            rank_order(self.schedule, rank, self.ranks, micro_batches, self.chunks, self.group)
            for rank in range(self.ranks)
        ]
        return simulate(orders, self.forward, self.backward, self.chunks, weight=self.weight)

    def seconds(self, micro_batches: int) -> float:
        """Of so many micro-batches, simulated one by one or, for very many, as far as they do not repeat."""
        group = max(self.ranks, self.group)
        enough = max(_SETTLED * group, MOST_SIMULATED // self.slots)
        if micro_batches <= enough:
            return self.run(micro_batches).seconds
        enough -= (enough - micro_batches) % group
        left = (micro_batches - enough) // group
        settled = self.run(enough).seconds
        return settled + left * (settled - self.run(enough - group).seconds)

    def shown(self, micro_batches: int) -> int:
        """How many fit into a picture; whole groups where more than one fits."""
        group = max(self.ranks, self.group)
        most = min(micro_batches, _SHOWN_GROUPS * group, max(1, MOST_SLOTS // self.slots))
        return most - most % group if group < most < micro_batches else most


def schedule(context: CostContext, batch: StrategyBatch, strategy: Strategy) -> Schedule | None:
    """None without a pipeline, and where ranks share cores: an idle one then speeds the others up."""
    if strategy.pp == 1 or context.cluster.ranks_per_core > 1.0:
        return None
    pipeline = _pipeline(context, batch, strategy)
    shown = pipeline.shown(strategy.grad_accum)
    run = pipeline.run(shown)
    seconds = run.seconds if shown == strategy.grad_accum else pipeline.seconds(strategy.grad_accum)
    return Schedule(
        name=strategy.pipeline_schedule,
        stages=strategy.pp,
        micro_batches=strategy.grad_accum,
        shown_micro_batches=shown,
        slots=tuple(_slots(run)),
        simulated_s=seconds,
        busy_share=strategy.grad_accum * pipeline.work_s / (strategy.pp * seconds),
    )


def _pipeline(context: CostContext, batch: StrategyBatch, strategy: Strategy) -> _Pipeline:
    times = stage_times(context, batch)
    apart = strategy.pipeline_schedule in ("zb-h1", "zb-h2")
    return _Pipeline(
        schedule=strategy.pipeline_schedule,
        ranks=strategy.pp,
        chunks=strategy.vpp,
        group=int(interleaving_group(Work(context, batch))[0]),
        forward=times.forward.tolist(),
        backward=(times.backward - times.weight_gradients if apart else times.backward).tolist(),
        weight=times.weight_gradients.tolist() if apart else [],
    )


def _slots(run: Run) -> Iterator[Slot]:
    for rank, order in enumerate(run.orders):
        steady, cool = _phases(order)
        for at, ((kind, chunk, micro_batch), start, end) in enumerate(
            zip(order, run.starts[rank], run.ends[rank], strict=True)
        ):
            phase: SlotPhase = "warm-up" if at < steady else "steady" if at < cool else "cool-down"
            # The numbers are the program's own: checking each of some thousand slots takes longer than the simulation.
            yield Slot.model_construct(
                stage=rank,
                chunk=chunk,
                micro_batch=micro_batch,
                kind=_KINDS[kind],
                phase=phase,
                start_s=start,
                end_s=end,
            )


def _phases(order: list[Op]) -> tuple[int, int]:
    """Where a rank's steady state begins and ends: with the forward pass in front of its first backward pass, and
    behind the backward pass that follows its last forward pass.  Both are the same where no forward pass follows a
    backward pass (GPipe, few micro-batches)."""
    kinds = [kind for kind, _, _ in order]
    back = kinds.index(BACKWARD)
    last = len(kinds) - 1 - kinds[::-1].index(FORWARD)
    if last < back:
        return back, back
    return back - 1, kinds.index(BACKWARD, last) + 1
