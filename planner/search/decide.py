"""The exact optimum of one candidate over its inner decisions.

A given layout leaves a small grid (recomputed layers times offload steps), which is priced whole; open layouts go to
CP-SAT.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from planner.search.bounds import Needs, full_bound
from planner.search.incumbent import Incumbents, construct
from planner.search.inner import Inner
from planner.specs.batch import IntArray

_SAME = 1e-9
"""Relative difference below which two step times are one."""


@dataclass(frozen=True)
class Decision:
    """The best decision of a candidate; absent where none is better than the cutoff."""

    proven: bool
    used_solver: bool
    layout: IntArray | None = None
    recomputed: int = 0
    step: int = 0
    step_time_s: float = float("inf")
    memory_bytes: float = float("inf")


def decide(
    inner: Inner,
    needs: Needs,
    known: Incumbents,
    *,
    cutoff_s: float,
    minimise_memory: bool,
    time_limit_s: float | None,
) -> Decision:
    """The optimum of the single candidate in ``inner`` if it is faster than ``cutoff_s``; ``known`` starts the
    solver."""
    if not inner.group.free:
        return _whole_grid(inner, needs, minimise_memory)
    if not minimise_memory and needs.step[0] < needs.most_steps[0]:
        return _by_step(inner, needs, cutoff_s, time_limit_s)
    return _solved(inner, needs, known, cutoff_s, minimise_memory, time_limit_s)


def _by_step(inner: Inner, needs: Needs, cutoff_s: float, time_limit_s: float | None) -> Decision:
    """Every offload step by itself, best bound first: a given step leaves no products of variables to the solver."""
    steps = np.arange(int(needs.step[0]), int(needs.most_steps[0]) + 1)
    many = inner.take(np.zeros(len(steps), dtype=np.int64))
    loose = Needs(np.repeat(needs.recomputed, len(steps)), steps, steps)
    bound = full_bound(many, loose)
    known = construct(many, bound.needs, bound.step_time_s)
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    best, proven, used = Decision(proven=True, used_solver=False), True, False
    first = int(known.step_time_s.argmin())
    if known.step_time_s[first] < cutoff_s:
        row = many.take(np.array([first]))
        best = _priced(row, known.layout[first], int(known.recomputed[first]), int(known.step[first]), proven=True)
    for place in np.argsort(bound.step_time_s, kind="stable").tolist():
        target = min(cutoff_s, best.step_time_s * (1 - _SAME))
        if bound.step_time_s[place] >= target:
            break
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        one, at = many.take(np.array([place])), np.array([place])
        fixed = Needs(bound.needs.recomputed[at], steps[at], steps[at])
        hint = Incumbents(*(column[at] for column in _columns(known)))
        decision = _solved(one, fixed, hint, target, False, left)
        proven, used = proven and decision.proven, used or decision.used_solver
        if decision.step_time_s < best.step_time_s:
            best = decision
    return replace(best, proven=proven, used_solver=used)


def _columns(known: Incumbents) -> tuple[Any, ...]:
    """The columns of incumbents in the order of the fields."""
    return tuple(getattr(known, f.name) for f in fields(known))


def _solved(
    inner: Inner,
    needs: Needs,
    known: Incumbents,
    cutoff_s: float,
    minimise_memory: bool,
    time_limit_s: float | None,
) -> Decision:
    """One constraint model."""
    from planner.search.model import Hint, solve

    hint = None
    if np.isfinite(known.step_time_s[0]):
        hint = Hint(known.layout[0], int(known.recomputed[0]), int(known.step[0]))
    solution = solve(
        inner, needs, cutoff_s=cutoff_s, hint=hint, time_limit_s=time_limit_s, minimise_memory=minimise_memory
    )
    proven = solution.status in ("optimal", "infeasible")
    if solution.layout is None:
        return Decision(proven, used_solver=True)
    return _priced(inner, solution.layout, solution.recomputed, solution.step, proven)


def _priced(inner: Inner, layout: IntArray, recomputed: int, step: int, proven: bool) -> Decision:
    """What the cost model says of the solver's decision; only that counts."""
    row, one = np.zeros(1, dtype=np.int64), layout[None, :]
    result = inner.price(row, one, row + recomputed, row + step)
    if not inner.fits(result)[0] or (layout < inner.group.least_layers).any() or layout.sum() != inner.layers:
        raise RuntimeError(f"the constraint model accepted a layout that is none or does not fit: {layout.tolist()}")
    return Decision(
        proven, True, layout, recomputed, step, float(result.step_time_s[0]), float(result.peak_memory_bytes[0])
    )


def _whole_grid(inner: Inner, needs: Needs, minimise_memory: bool) -> Decision:
    """Every number of recomputed layers with every offload step for the framework's own split."""
    layout = inner.group.batch.stage_layers[0]
    counts = (
        np.arange(int(needs.recomputed[0]), int(layout.max()) + 1) if inner.group.counted[0] else np.zeros(1, dtype=int)
    )
    steps = np.arange(int(needs.step[0]), int(needs.most_steps[0]) + 1)
    recomputed, step = (axis.reshape(-1) for axis in np.meshgrid(counts, steps, indexing="ij"))
    rows = np.zeros(len(recomputed), dtype=np.int64)
    result = inner.price(rows, np.broadcast_to(layout, (len(rows), len(layout))), recomputed, step)
    legal = inner.fits(result)
    if not legal.any():
        return Decision(proven=True, used_solver=False)
    keys = (result.step_time_s, result.peak_memory_bytes) if not minimise_memory else (
        result.peak_memory_bytes, result.step_time_s
    )  # fmt: skip
    first = np.where(legal, keys[0], np.inf)
    best = int(np.lexsort((np.where(legal, keys[1], np.inf), first))[0])
    return Decision(
        True, False, layout, int(recomputed[best]), int(step[best]),
        float(result.step_time_s[best]), float(result.peak_memory_bytes[best]),
    )  # fmt: skip
