"""The least level at which ranks can hold a given number of whole layers (integer water-filling).

A rank holding l layers reaches slope * l + extra.  The level is what the fullest rank reaches; the least level at
which all ranks together hold L layers bounds the slowest rank, the longest tail and the fullest memory from below.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.specs.batch import BoolArray, FloatArray, IntArray

MOST = 1e6
"""More layers than any model has; an infinite level holds this many."""

BISECTIONS = 12
"""Halvings before the last few levels are tried one by one."""

_ROUNDING = 1e-9
"""Added before rounding down, relative to a layer: a level that is reached exactly must count as reached."""


def held(slope: FloatArray, extra: FloatArray, level: FloatArray) -> IntArray:
    """Whole layers that each rank holds below a level; ``slope`` (N, 1) or (N, R) positive, ``extra`` (N, R), level
    (N,)."""
    whole = np.floor((level[:, None] - extra) / slope + _ROUNDING)
    return np.minimum(np.maximum(whole, 0.0), MOST).astype(np.int64)


def least_level(slope: FloatArray, extra: FloatArray, ranks: IntArray, layers: int, least: int) -> FloatArray:
    """(N,) smallest level; ``extra`` (N, R) by kind of rank of which there are ``ranks`` (R,), each with >= ``least``
    layers.

    Exact for positive slopes.  A slope of zero or less (N, 1) gives the level at ``least`` layers, which is a bound
    for zero.
    """
    positive = slope > 0
    safe = np.where(positive, slope, 1.0)
    mean = (safe[:, 0] * layers + (extra * ranks).sum(axis=1)) / ranks.sum()
    # Between the mean and one layer more each kind of rank reaches exactly one whole number of layers: those are the
    # levels.
    next_whole = np.ceil((mean[:, None] - extra) / safe - _ROUNDING)
    levels = safe * np.maximum(next_whole, 1.0) + extra
    best = np.full(len(mean), np.inf)
    for kind in range(extra.shape[1]):
        total = (held(safe, extra, levels[:, kind]) * ranks).sum(axis=1)
        best = np.where((total >= layers) & (levels[:, kind] < best), levels[:, kind], best)
    # Where a rank's extra alone exceeds the mean, it has no layer to give back and only its own level counts.
    best = np.where((extra > mean[:, None]).any(axis=1), -np.inf, np.where(np.isfinite(best), best, mean))
    least_filled = (slope * least + extra).max(axis=1)
    return np.asarray(np.where(positive[:, 0], np.maximum(best, least_filled), least_filled))


def held_recomputing(
    slope: FloatArray, again: FloatArray, spread: IntArray, extra: FloatArray, level: FloatArray
) -> IntArray:
    """(N, R) most layers of a rank below a level when the first ``spread`` of them cost ``again`` more."""
    few = held(slope + again, extra, level)
    return np.where(few < spread, few, np.maximum(held(slope, extra + again * spread, level), spread))


def least_where(
    low: FloatArray,
    high: FloatArray,
    holds: Callable[[FloatArray, IntArray], BoolArray],
    following: Callable[[FloatArray, IntArray], FloatArray],
) -> FloatArray:
    """(N,) smallest level at which a monotone condition holds; infinite where it fails even at ``high``.

    ``following(levels, rows)`` is the next level at which anything changes, so a few halvings and then steps from
    level to level end on the exact one.  Both functions are asked for the rows in question only.
    """
    level = low.copy()
    rows = np.flatnonzero(~holds(low, np.arange(len(low))))
    possible = holds(high[rows], rows)
    level[rows[~possible]] = np.inf
    rows = rows[possible]
    below, above = low[rows], high[rows]
    for _ in range(BISECTIONS if len(rows) else 0):
        middle = (below + above) / 2
        true = holds(middle, rows)
        below, above = np.where(true, below, middle), np.where(true, middle, above)
    while len(rows):
        below = np.minimum(np.maximum(following(below, rows), np.nextafter(below, np.inf)), above)
        level[rows] = below
        unmet = ~holds(below, rows)
        rows, below, above = rows[unmet], below[unmet], above[unmet]
    return level
