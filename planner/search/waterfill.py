"""The least level at which ranks can hold a given number of whole layers (integer water-filling).

A rank holding l layers reaches slope * l + extra.  The level is what the fullest rank reaches; the least level at which all
ranks together hold L layers bounds the slowest rank, the longest tail and the fullest memory from below.
"""

from __future__ import annotations

import numpy as np

from planner.specs.batch import FloatArray, IntArray

_ROUNDING = 1e-9
"""Added before rounding down, relative to a layer: a level that is reached exactly must count as reached."""


def held(slope: FloatArray, extra: FloatArray, level: FloatArray) -> IntArray:
    """Whole layers that each rank holds below a level; ``slope`` (N, 1) or (N, R) positive, ``extra`` (N, R), level (N,)."""
    return np.maximum(np.floor((level[:, None] - extra) / slope + _ROUNDING), 0.0).astype(np.int64)


def least_level(slope: FloatArray, extra: FloatArray, ranks: IntArray, layers: int, least: int) -> FloatArray:
    """(N,) smallest level; ``extra`` (N, R) by kind of rank of which there are ``ranks`` (R,), each with >= ``least`` layers.

    Exact for positive slopes.  A slope of zero or less (N, 1) gives the level at ``least`` layers, which is a bound for zero.
    """
    positive = slope > 0
    safe = np.where(positive, slope, 1.0)
    mean = (safe[:, 0] * layers + (extra * ranks).sum(axis=1)) / ranks.sum()
    # Between the mean and one layer more each kind of rank reaches exactly one whole number of layers: those are the levels.
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


def least_level_capped(slope: FloatArray, extra: FloatArray, caps: IntArray, layers: int, least: int) -> FloatArray:
    """(N,) smallest level of ranks that hold at most ``caps`` (N, R) layers; infinite where the caps do not suffice."""
    floor_level = least_level(slope, extra, np.ones(extra.shape[1], dtype=np.int64), layers, least)
    low, high = floor_level, slope[:, 0] * layers + extra.max(axis=1)
    level = low
    enough = np.minimum(held(slope, extra, level), caps).sum(axis=1) >= layers
    if not enough.all():
        for _ in range(60):
            middle = (low + high) / 2
            reached = np.minimum(held(slope, extra, middle), caps).sum(axis=1) >= layers
            low, high = np.where(reached, low, middle), np.where(reached, middle, high)
        level = np.where(enough, level, high)
    return np.where(caps.sum(axis=1) >= layers, level, np.inf)
