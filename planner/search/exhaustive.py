"""The oracle: every candidate with every inner decision, priced one by one.

Shares the space and the cost model with the engine and nothing else, so that tests can hold the engine's bounds,
constructions and constraint models against it.  Grows exponentially with the layers: small problems only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from planner.cost.evaluate import evaluate
from planner.errors import InputError
from planner.search.problem import Problem
from planner.search.space import Group, enumerate_space, stage_cap
from planner.specs.batch import IntArray, StrategyBatch

MAX_STRATEGIES = 5_000_000


def compositions(layers: int, stages: int, *, bare_end: bool = False) -> IntArray:
    """(C, S) all ways to give each stage at least one of the layers, with ``bare_end`` the last one none or more."""
    if bare_end:
        bare = np.pad(compositions(layers, stages - 1), ((0, 0), (0, 1)))
        return np.concatenate([compositions(layers, stages), bare])
    cuts = np.array(list(combinations(range(1, layers), stages - 1)), dtype=np.int64).reshape(-1, stages - 1)
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))
    return np.diff(edges, axis=1)


def every_decision(group: Group, layers: int) -> StrategyBatch:
    """All complete strategies of a group."""
    layouts = group.batch.stage_layers[:1]
    if group.free:
        layouts = compositions(layers, group.pp * group.vpp, bare_end=group.bare_end)
        layouts = layouts[(layouts <= stage_cap(layers, group.pp, group.vpp)).all(axis=1)]
    rows, layout, most, share = [], [], [], []
    for row in range(len(group)):
        counts = range(1, int(layouts.max()) + 1) if group.counted[row] else [int(group.batch.recompute_layers[row])]
        steps = int(group.steps[row])
        shares = [step / steps for step in range(1, steps + 1)] if steps else [0.0]
        for index in range(len(layouts)):
            for count in counts:
                for value in shares:
                    rows.append(row)
                    layout.append(index)
                    most.append(count)
                    share.append(value)
    if len(rows) > MAX_STRATEGIES:
        raise InputError("the problem is too large to enumerate", got=f"{len(rows)} strategies",
                         allowed=f"at most {MAX_STRATEGIES}")  # fmt: skip
    return group.batch.take(np.array(rows)).with_values(
        stage_layers=layouts[layout], recompute_layers=np.array(most), offload_optimizer=np.array(share)
    )


def every_strategy(problem: Problem) -> Iterator[StrategyBatch]:
    """All legal complete strategies, one batch a group."""
    for group in enumerate_space(problem.context, problem.pins).groups:
        yield every_decision(group, problem.context.model.layers)


def exhaustive_optimum(problem: Problem) -> tuple[float, float, StrategyBatch] | None:
    """(step time, peak memory, strategy) of the best fitting plan by the job's objective; None when nothing fits."""
    minimise_memory = problem.context.job.objective == "memory"
    best: tuple[tuple[float, float], StrategyBatch] | None = None
    for batch in every_strategy(problem):
        prices = evaluate(problem.context, batch)
        fitting = np.flatnonzero(prices.fits)
        if len(fitting) == 0:
            continue
        keys = [prices.step_time_s[fitting], prices.peak_memory_bytes[fitting]]
        first, second = keys[::-1] if minimise_memory else keys
        index = int(np.lexsort((second, first))[0])
        key = (float(first[index]), float(second[index]))
        if best is None or key < best[0]:
            best = key, batch.take([int(fitting[index])])
    if best is None:
        return None
    key, strategy = best
    return (*(key[::-1] if minimise_memory else key), strategy)
