"""Multiplying candidates out: every row once for each of its options, without a Python loop over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.specs.batch import IntArray, StrategyBatch

Options = Callable[..., Sequence[tuple[Any, ...]]]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def group_index(columns: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Distinct rows of some columns as (first occurrence, group of each row)."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        code = code * len(values) + inverse
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)


def expand(batch: StrategyBatch, names: Sequence[str], keys: Sequence[str], options: Options) -> StrategyBatch:
    """Repeat each row for every option tuple of ``names``; ``options`` sees the values of ``keys`` as arguments.

    Rows without an option vanish.  Options are asked for once for each distinct combination of key values.
    """
    if len(batch) == 0:
        return batch
    columns = [getattr(batch, key) for key in keys] or [np.zeros(len(batch), dtype=np.int64)]
    first, group = group_index(columns)
    lists = [list(options(*(int(getattr(batch, key)[row]) for key in keys))) for row in first]
    sizes = np.array([len(choices) for choices in lists], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    flat = [choice for choices in lists for choice in choices]
    counts = sizes[group]
    rows = np.repeat(np.arange(len(batch)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.repeat(starts[group], counts) + within
    values = {name: np.array([choice[j] for choice in flat])[chosen] for j, name in enumerate(names) if flat}
    return batch.take(rows).with_values(**values)
