"""The exact optimum of one candidate over its inner decisions.

A given layout leaves a small grid (recomputed layers times offload steps), which is priced whole; open layouts go to
CP-SAT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.bounds import Needs
from planner.search.incumbent import Incumbents
from planner.search.inner import Inner
from planner.specs.batch import IntArray


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
    if not inner.fits(result)[0] or layout.min() < 1 or layout.sum() != inner.layers:
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
