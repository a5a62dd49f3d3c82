"""Best-first search: the candidate with the smallest bound is decided exactly until no bound is below the best plan
found.

Deterministic: one solver worker, fixed seed, ties broken by fewer dimensions in use, then less memory, then the columns
themselves.  The answer is the optimum of the cost model over everything the backend can run, or says how far it may
be off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.evaluate import evaluate
from planner.errors import TimeLimitError
from planner.search.decide import Decision, decide
from planner.search.frontier import TIE, Block, Frontier
from planner.search.outcome import Outcome, Progress, ProgressCallback, Status
from planner.search.problem import Problem
from planner.search.relax import explain_infeasible
from planner.search.space import enumerate_space, pinned_out
from planner.specs.batch import StrategyBatch

__all__ = ["Problem", "search"]


def search(
    problem: Problem,
    *,
    top: int = 5,
    time_limit_s: float | None = None,
    progress: ProgressCallback | None = None,
    explain: bool = True,
) -> Outcome:
    """The best plan of the problem's backend and up to ``top`` alternatives on other meshes.

    ``explain`` looks for the nearest miss and for changes that help when nothing fits (more searches, in the same
    limit).  When the limit is over, the first plan is waited for a little longer.

    Raises InputError for pins that leave nothing, TimeLimitError when the limit ends the search before it is known
    whether there is a plan.
    """
    run = _Run(problem, top, time_limit_s, progress)
    outcome = run.search()
    if outcome.status == "infeasible" and explain:
        report = explain_infeasible(
            problem, run.space, outcome.rejected, lambda other: feasible(other, run.remaining())
        )
        outcome = replace(outcome, infeasible=report)
    return replace(outcome, seconds=time.perf_counter() - run.started)


def feasible(problem: Problem, time_limit_s: float | None) -> bool:
    """Whether some plan fits, found as cheaply as possible; Ctrl-C ends what asked, which needs the whole answer.

    Raises InputError for pins that leave nothing, TimeLimitError when there is no time."""
    if time_limit_s is not None and time_limit_s <= 0:
        raise TimeLimitError("no time is left")
    outcome = _Run(problem, 0, time_limit_s, None, grace_s=0.0).search()
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome.best is not None


GRACE_S = 3.0
"""A search without a plan goes on so long after its limit."""


@dataclass
class _Run:
    """State of one search."""

    problem: Problem
    top: int
    time_limit_s: float | None
    progress: ProgressCallback | None
    grace_s: float = GRACE_S
    started: float = field(default_factory=time.perf_counter)
    solved: int = 0
    unproven: int = 0
    """Candidates on which the solver ran out of time."""

    def search(self) -> Outcome:
        context = self.problem.context
        self.minimise_memory = context.job.objective == "memory"
        self.frontier = Frontier(context, self.top, self.minimise_memory, self._out_of_time, self._give_up)
        self.space = enumerate_space(context, self.problem.pins, self._give_up)
        interrupted = False
        try:
            self.frontier.collect(self.space)
            bound = self._improve()
        except KeyboardInterrupt:
            if not self._values():
                raise
            interrupted, bound = True, 0.0
        if not self.frontier.examined and self.problem.pins:
            raise pinned_out(self.problem.pins, self.space.refusals, context.backend.name)
        rejected = self.space.rejected
        if self.frontier.does_not_fit:
            rejected["does-not-fit"] = self.frontier.does_not_fit
        done = not interrupted and self.frontier.complete and not self.unproven and bound == float("inf")
        if not self._values():
            if not done:
                raise self._without_a_plan()
            return Outcome("infeasible", None, candidates=self.space.size, rejected=rejected, solved=self.solved)
        outcome = self._outcome("optimal" if done else "feasible", bound, rejected)
        return replace(outcome, interrupted=interrupted)

    def remaining(self) -> float | None:
        """Seconds left, none or negative when the time is up; None without a limit."""
        return None if self.time_limit_s is None else self.time_limit_s - (time.perf_counter() - self.started)

    def _out_of_time(self) -> bool:
        remaining = self.remaining()
        return remaining is not None and remaining <= 0

    def _give_up(self) -> None:
        """Raise TimeLimitError when the time and the grace are over without a plan."""
        remaining = self.remaining()
        if remaining is not None and remaining <= -self.grace_s and not self._values():
            raise self._without_a_plan()

    def _without_a_plan(self) -> TimeLimitError:
        return TimeLimitError(
            f"no plan was found within {self.time_limit_s:g} s",
            hint="raise --time-limit, or narrow the search with --backend and --pin",
        )

    def _values(self) -> dict[int, float]:
        """Best value by mesh, of the meshes that have a plan."""
        return {mesh: value for mesh, value in self.frontier.mesh_best.items() if np.isfinite(value)}

    def _best_value(self) -> float:
        return min(self._values().values(), default=float("inf"))

    def _improve(self) -> float:
        """Decide candidates by ascending bound; returns the smallest bound left undecided, infinite when all is
        proven."""
        bounds = np.concatenate([block.bound for block in self.frontier.blocks] or [np.zeros(0)])
        places = [(block, row) for block in self.frontier.blocks for row in range(len(block.bound))]
        left = float("inf")
        for place in np.argsort(bounds, kind="stable").tolist():
            bound, (block, row), best = float(bounds[place]), places[place], self._best_value()
            self._report(best, bound)
            if bound > best * (1 + TIE) or (bound >= best * (1 - TIE) and not self.minimise_memory):
                break
            if self._out_of_time():
                return min(left, bound)
            if not self._decide(block, row, bound, best):
                left = min(left, bound)
        return left

    def _decide(self, block: Block, row: int, bound: float, best: float) -> bool:
        """Find the optimum of one candidate; false when it stays unproven."""
        known = block.incumbents
        if not self.minimise_memory and known.step_time_s[row] <= bound * (1 + TIE):
            return True
        one = block.take(np.array([row]))
        cutoff = float("inf") if self.minimise_memory else best * (1 - TIE)
        decision = decide(
            one.inner, one.needs, one.incumbents, cutoff_s=cutoff, minimise_memory=self.minimise_memory,
            time_limit_s=self.remaining(),
        )  # fmt: skip
        self.solved += decision.used_solver
        self.unproven += not decision.proven
        self._take_over(block, row, decision)
        return decision.proven

    def _take_over(self, block: Block, row: int, decision: Decision) -> None:
        """Make a decision the candidate's incumbent if it is better."""
        if decision.layout is None:
            return
        known = block.incumbents
        mine = (decision.step_time_s, decision.memory_bytes)
        theirs = (float(known.step_time_s[row]), float(known.memory_bytes[row]))
        if self.minimise_memory:
            mine, theirs = mine[::-1], theirs[::-1]
        if mine < theirs:
            known.step_time_s[row], known.memory_bytes[row] = decision.step_time_s, decision.memory_bytes
            known.layout[row], known.recomputed[row], known.step[row] = (
                decision.layout,
                decision.recomputed,
                decision.step,
            )
            self.frontier.found(int(block.mesh[row]), mine[0])

    def _report(self, best: float, bound: float) -> None:
        if self.progress is not None:
            known = None if self.minimise_memory or not np.isfinite(best) else best
            self.progress(Progress(known, None if self.minimise_memory else bound, self.solved, self.space.size))

    def _outcome(self, status: Status, bound: float, rejected: dict[str, int]) -> Outcome:
        chosen = self._ranked()
        batch = StrategyBatch.concatenate([strategy for strategy, _ in chosen])
        prices = evaluate(self.problem.context, batch)
        if not prices.fits.all():
            raise RuntimeError("a plan that the search accepted does not fit by the cost model")
        best_s = float(prices.step_time_s[0])
        limit = best_s if status == "optimal" else None
        if limit is None and not self.minimise_memory:
            limit = min(best_s, bound) if np.isfinite(bound) and bound > 0 else None
        return Outcome(
            status,
            batch.take([0]),
            alternatives=tuple(strategy for strategy, _ in chosen[1:]),
            best_bound_s=limit,
            gap=None if limit is None else (best_s - limit) / best_s,
            candidates=self.space.size,
            rejected=rejected,
            solved=self.solved,
            alternatives_proven=tuple(proven for _, proven in chosen[1:]),
        )

    def _ranked(self) -> list[tuple[StrategyBatch, bool]]:
        """The best plan of each of the best ``top + 1`` meshes, and whether nothing on that mesh can be better."""
        values = self._values()
        meshes = sorted(values, key=lambda mesh: values[mesh])
        chosen = []
        limit = values[meshes[0]] * (1 + TIE)
        tied = [mesh for mesh in meshes if values[mesh] <= limit]
        first = min((self._best_of({mesh}) for mesh in tied), key=lambda found: found[0])
        chosen.append(first)
        chosen += [self._best_of({mesh}) for mesh in [mesh for mesh in meshes if mesh != first[0][-1]][: self.top]]
        return [(strategy, proven) for _, strategy, proven in chosen]

    def _best_of(self, meshes: set[int]) -> tuple[tuple[object, ...], StrategyBatch, bool]:
        """(order key, strategy, proven) of the best plan on some meshes."""
        found: list[tuple[tuple[object, ...], Block, int]] = []
        least_bound = float("inf")
        target = min(self._values()[mesh] for mesh in meshes)
        for block in self.frontier.blocks:
            time_s, memory = block.incumbents.step_time_s, block.incumbents.memory_bytes
            value = memory if self.minimise_memory else time_s
            here = np.isin(block.mesh, list(meshes))
            least_bound = min(least_bound, float(block.bound[here & (value > target * (1 + TIE))].min(initial=np.inf)))
            rows = np.flatnonzero(here & (value <= target * (1 + TIE))).tolist()
            found += [(self._key(block, row), block, row) for row in rows]
        key, block, row = min(found, key=lambda item: item[0])
        known = block.incumbents
        strategy = block.inner.decided(row, known.layout[row], int(known.recomputed[row]), int(known.step[row]))
        return key, strategy, least_bound >= target * (1 - TIE)

    def _key(self, block: Block, row: int) -> tuple[object, ...]:
        """Order among equally good plans; the mesh comes last so that it can be read off."""
        batch, known = block.inner.group.batch, block.incumbents
        degrees = [int(getattr(batch, name)[row]) for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")]
        savers = [int(getattr(batch, name)[row]) for name in ("zero_stage", "recompute_kind", "offload_device")]
        dimensions = sum(degree > 1 for degree in degrees) + sum(saver > 0 for saver in savers)
        primary = float(f"{known.step_time_s[row]:.9e}") if self.minimise_memory else 0.0
        rest = [
            int(getattr(batch, n)[row]) for n in ("micro_batch", "shard_degree", "secondary_shard_degree", "schedule")
        ]
        return (
            primary, dimensions, float(f"{known.memory_bytes[row]:.9e}"), *degrees, *savers, *rest,
            int(batch.offload_parameters[row]), bool(batch.sequence_parallel[row]), int(block.mesh[row]),
        )  # fmt: skip
