"""Runs the search for one or all frameworks and, for the cost objective, over the number of nodes.

Ranks plans of several frameworks by the job's objective and turns "nothing fits" into an error that says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.cost.estimate import estimate as cost_estimate
from planner.errors import InfeasibleError, InputError, PlannerError, TimeLimitError
from planner.service.clusters import with_gpus
from planner.service.document import merged_report
from planner.service.failures import nothing_found, out_of_time
from planner.service.profiles import context_of
from planner.service.requests import SearchProgress, SearchState
from planner.service.why import why_best
from planner.specs.batch import StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.convert import to_strategy
from planner.specs.plan import Plan, Request, SearchReport

if TYPE_CHECKING:
    from planner.search.outcome import Outcome
    from planner.search.outcome import Progress as EngineState

MAX_NODE_COUNTS = 24
"""Cluster sizes that the cost objective tries at most."""
LEAST_SHARE_S = 0.01
"""A search whose time is up is asked all the same: it may have a first plan at once."""
LONGEST_OVERRUN_S = 1.0
"""After so much more than the limit no further search is begun."""


@dataclass(frozen=True)
class Found:
    """What the searches of all backends gave together."""

    best: Plan
    alternatives: tuple[Plan, ...]
    by_backend: dict[str, Plan | None]
    report: SearchReport
    warnings: tuple[str, ...]
    interrupted: bool = False


@dataclass(frozen=True)
class _Clock:
    """A time limit that several searches share."""

    limit_s: float | None
    started: float = field(default_factory=time.monotonic)

    def share(self, parts: int) -> float | None:
        """An equal share of the time that is left, for one of so many searches that are still to come.

        Raises TimeLimitError where so much more than the limit was taken that none is worth a try."""
        if self.limit_s is None:
            return None
        left = self.limit_s - (time.monotonic() - self.started)
        if left < -LONGEST_OVERRUN_S:
            raise out_of_time(())
        return max(left / parts, LEAST_SHARE_S)


@dataclass
class _Running:
    """Results of the backends searched so far."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    plans: dict[str, list[Plan]] = field(default_factory=dict)
    refused: dict[str, PlannerError] = field(default_factory=dict)
    """Backends that cannot take a pin, or that found nothing in their time."""
    interrupted: bool = False


def search_backends(
    request: Request,
    names: Sequence[str],
    top: int,
    time_limit_s: float | None,
    progress: SearchProgress | None = None,
    *,
    explain: bool = True,
) -> Found:
    """The best plan over the named backends; each gets an equal share of the time that is left.

    Without one it is explained what came nearest and what would help, in the time that is left then."""
    running = _Running()
    clock = _Clock(time_limit_s)
    for position, name in enumerate(names):
        if progress:
            progress(SearchState(name))
        try:
            _search_one(running, request, name, top, clock, len(names) - position, progress)
        except KeyboardInterrupt:
            if not any(running.plans.values()):
                raise
            running.interrupted = True
        running.interrupted |= name in running.outcomes and running.outcomes[name].interrupted
        if running.interrupted:
            break
    if not any(running.plans.values()):
        raise _failure(running, request, clock if explain else None)
    return _ranked(running, request, top)


def check_pins(request: Request, names: Sequence[str]) -> None:
    """Raise InputError for pins that no framework can keep on these GPUs, found without a search."""
    if not request.pins:
        return
    from planner.search.choices import check_choices

    cluster = request.cluster
    nodes = node_counts(cluster.nodes) if request.job.objective == "cost" else [cluster.nodes]
    parts = [cluster if some == cluster.nodes else with_gpus(cluster, some * cluster.gpus_per_node) for some in nodes]
    refused: dict[str, PlannerError] = {}
    for name in names:
        for part in parts:
            try:
                check_choices(context_of(request.model_copy(update={"cluster": part}), name), request.pins)
            except InputError as problem:
                refused.setdefault(name, problem)
            else:
                return
    raise _refused_by_all(refused)


def _search_one(
    running: _Running,
    request: Request,
    name: str,
    top: int,
    clock: _Clock,
    parts: int,
    progress: SearchProgress | None,
) -> None:
    try:
        outcome = _search(request, name, top, clock.share(parts), explain=False, progress=progress)
    except (InputError, TimeLimitError) as problem:
        # With several backends a pin that one of them cannot express only rules out that one.
        running.refused[name] = problem
        running.plans[name] = []
        return
    running.outcomes[name] = outcome
    running.plans[name] = _plans(request, name, outcome)


def _ranked(running: _Running, request: Request, top: int) -> Found:
    plans = running.plans
    ranked = sorted(
        (plan for found in plans.values() for plan in found), key=lambda plan: objective_value(request, plan)
    )
    warnings = [f"{name} is left out: {problem.message}" for name, problem in running.refused.items()]
    warnings += [
        f"the search of {name} ended at its limit: its plan is the best found, not proven best"
        for name, outcome in running.outcomes.items()
        if outcome.status == "feasible" and not outcome.interrupted
    ]
    if running.interrupted:
        warnings.append("interrupted: the plan is the best found until then")
    return Found(
        best=ranked[0],
        alternatives=tuple(ranked[1:top]),
        by_backend={name: found[0] if found else None for name, found in plans.items()},
        report=merged_report(running.outcomes, ranked[0]),
        warnings=tuple(warnings),
        interrupted=running.interrupted,
    )


def _failure(running: _Running, request: Request, clock: _Clock | None) -> PlannerError:
    """The error that nothing was found; explained where there is a clock."""
    cut = [name for name, problem in running.refused.items() if isinstance(problem, TimeLimitError)]
    if cut:
        return out_of_time(cut)
    if not running.outcomes:
        return _refused_by_all(running.refused)
    outcomes = dict(running.outcomes)
    if clock is not None:
        # Only now that nothing fits anywhere are the nearest miss and the changes that help worth their search.
        for position, name in enumerate(running.outcomes):
            outcomes[name] = _explained(request, name, outcomes[name], clock, len(outcomes) - position)
    return nothing_found(request, outcomes)


def _explained(request: Request, name: str, outcome: Outcome, clock: _Clock, parts: int) -> Outcome:
    """The outcome of a framework without a plan, with what came nearest and what would help as far as there is time."""
    try:
        return _search(request, name, 1, clock.share(parts), explain=True)
    except TimeLimitError:
        from planner.search.outcome import InfeasibleReport

        report = InfeasibleReport(outcome.rejected, None, (), complete=False)
        return replace(outcome, infeasible=report)


def _refused_by_all(refused: Mapping[str, PlannerError]) -> PlannerError:
    """One error for a question that every framework refused, with what each of them allows."""
    problems = list(refused.values())
    first = problems[0]
    same_place = len({problem.where for problem in problems}) == 1
    if not isinstance(first, InputError) or not same_place or len({problem.message for problem in problems}) == 1:
        return first
    # Their messages begin alike: "tp=3 is not possible: ...".
    heads, _, _ = zip(*(problem.message.partition(": ") for problem in problems), strict=True)
    shared = f"{heads[0]}: " if len(set(heads)) == 1 else ""
    return InputError(
        shared + "; ".join(dict.fromkeys(problem.message.removeprefix(shared) for problem in problems)),
        where=first.where,
        got=first.got,
        allowed="; ".join(f"{name}: {problem.allowed}" for name, problem in refused.items() if problem.allowed) or None,
        hint=first.hint,
    )


def _search(
    request: Request,
    name: str,
    top: int,
    time_limit_s: float | None,
    *,
    explain: bool,
    progress: SearchProgress | None = None,
) -> Outcome:
    # The search and its numpy are loaded when the first one runs.
    from planner.search.engine import Problem, search

    context = context_of(request, name)
    problem = Problem(context, request.pins)
    tell = None if progress is None else _teller(name, progress)
    return search(problem, top=top, time_limit_s=time_limit_s, explain=explain, progress=tell)


def _teller(name: str, progress: SearchProgress) -> Callable[[EngineState], None]:
    """Passes on what the search of one framework reports."""

    def tell(state: EngineState) -> None:
        progress(SearchState(name, state.candidates, state.solved, state.best_step_time_s, state.bound_s))

    return tell


def _plans(request: Request, name: str, outcome: Outcome) -> list[Plan]:
    """Best and alternatives of one backend as plans, in the order of the search."""
    if outcome.best is None:
        return []
    context = context_of(request, name)
    rows: list[StrategyBatch] = [outcome.best, *outcome.alternatives]
    plans = [
        Plan(
            backend=name,
            strategy=to_strategy(row, 0, context.recompute_kinds, request.job),
            estimate=cost_estimate(context, row),
        )
        for row in rows
    ]
    plans[0] = plans[0].model_copy(update={"why": why_best(context, outcome.best, plans)})
    return plans


def objective_value(request: Request, plan: Plan) -> float:
    """What the job minimises: step time, peak memory, or dollars per token (step time on a given cluster)."""
    return plan.estimate.peak_memory_bytes if request.job.objective == "memory" else plan.estimate.step_time_s


def node_counts(nodes: int) -> list[int]:
    """Node counts worth trying up to ``nodes``, largest first: all of few, else divisors and powers of two."""
    if nodes <= MAX_NODE_COUNTS:
        return list(range(nodes, 0, -1))
    steps = {nodes // d for d in range(1, nodes + 1) if nodes % d == 0} | {1 << k for k in range(nodes.bit_length())}
    return sorted((n for n in steps if n <= nodes), reverse=True)[:MAX_NODE_COUNTS]


def cheapest_cluster(
    request: Request, names: Sequence[str], time_limit_s: float | None, progress: SearchProgress | None = None
) -> tuple[Cluster, str, bool]:
    """The part of the cluster, in whole nodes, with the lowest cost per token, a sentence about it, and whether Ctrl-C
    ended the comparison."""
    cluster = request.cluster
    clock = _Clock(time_limit_s)
    tried: list[tuple[float, Cluster]] = []
    interrupted = False
    counts = node_counts(cluster.nodes)
    for position, nodes in enumerate(counts):
        part = cluster if nodes == cluster.nodes else with_gpus(cluster, nodes * cluster.gpus_per_node)
        asked = request.model_copy(update={"cluster": part})
        try:
            left = clock.share(len(counts) - position + 1)
            found = search_backends(asked, names, 1, left, progress, explain=False)
        except (InfeasibleError, InputError, TimeLimitError):
            continue  # pins may fit other parts of the cluster
        except KeyboardInterrupt:
            if not tried:
                raise
            interrupted = True
            break
        tried.append((found.best.estimate.step_time_s * part.gpus, part))
        interrupted = found.interrupted
        if interrupted:
            break
    if not tried:
        # Raises: the whole cluster is what is worth an explanation.
        search_backends(request, names, 1, clock.share(1), progress)
    _, chosen = min(tried, key=lambda item: (item[0], item[1].gpus))
    extent = f"{position + 1} of {len(counts)} node counts were tried"
    return chosen, f"{chosen.gpus} of {cluster.gpus} GPUs give the lowest cost per token ({extent})", interrupted
