"""Pipeline schedules event by event: the order of work on every rank, and when each piece of it runs.

The closed forms of ``planner.cost.pipeline`` price millions of candidates; this simulation is what they are tested
against, and what is drawn of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.specs.batch import IntArray
from planner.specs.strategy import Schedule

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
"""A forward pass; a backward pass (of the inputs only, where weight gradients are slots of their own); these."""
Op = tuple[str, int, int]
"""(F, B or W, chunk of the rank, micro-batch)."""
_KINDS = (FORWARD, BACKWARD, WEIGHT)


@dataclass(frozen=True)
class Run:
    """What the simulated ranks did; all lists are by rank, seconds from the first forward pass."""

    orders: list[list[Op]]
    starts: list[list[float]]
    ends: list[list[float]]
    chunks: int

    @property
    def seconds(self) -> float:
        """From the first slot of any rank to the last."""
        return max(ends[-1] for ends in self.ends)

    @property
    def longest(self) -> float:
        """From the first to the last slot of one rank, the longest of all ranks: what a step takes where the optimizer
        step does not synchronise ranks."""
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def in_flight(self) -> list[float]:
        """Most activations alive on each rank, in micro-batches of its whole stage."""
        alive = []
        for order in self.orders:
            depth = np.cumsum([{FORWARD: 1, BACKWARD: -1, WEIGHT: 0}[kind] for kind, _, _ in order])
            alive.append(float(depth.max()) / self.chunks)
        return alive


def one_forward_one_backward(rank: int, p: int, m: int) -> list[Op]:
    """1F1B: as many forward passes as there are later ranks, then one backward pass behind each."""
    warm = min(p - 1 - rank, m)
    order: list[Op] = [(FORWARD, 0, i) for i in range(warm)]
    for i in range(m - warm):
        order += [(FORWARD, 0, warm + i), (BACKWARD, 0, i)]
    return order + [(BACKWARD, 0, i) for i in range(m - warm, m)]


def gpipe(m: int) -> list[Op]:
    """All forward passes, then all backward passes."""
    return [(FORWARD, 0, i) for i in range(m)] + [(BACKWARD, 0, i) for i in range(m)]


def interleaved(rank: int, p: int, m: int, v: int, group: int = 0) -> list[Op]:
    """Groups of micro-batches (of p where ``group`` is 0, the last of what is left) pass chunk after chunk; backward
    takes the chunks in reverse."""
    group = group or p
    sizes = [min(group, m - first) for first in range(0, m, group)]
    units = [
        (chunk, number * group + i) for number, size in enumerate(sizes) for chunk in range(v) for i in range(size)
    ]
    forward: list[Op] = [(FORWARD, chunk, micro) for chunk, micro in units]
    backward: list[Op] = [(BACKWARD, v - 1 - chunk, micro) for chunk, micro in units]
    warm = min(len(units), (p - rank - 1) * 2 + (v - 1) * group)
    order = forward[:warm]
    for i in range(len(units) - warm):
        order += [forward[warm + i], backward[i]]
    return order + backward[len(units) - warm :]


def zero_bubble(rank: int, p: int, m: int) -> list[Op]:
    """ZB-H1: 1F1B whose weight gradients wait for as many micro-batches as the rank's number, filling the drain."""
    order: list[Op] = [(FORWARD, 0, i) for i in range(min(p - 1 - rank, m))]
    for i in range(m):
        if p - 1 - rank + i < m:
            order.append((FORWARD, 0, p - 1 - rank + i))
        order.append((BACKWARD, 0, i))
        if i >= rank:
            order.append((WEIGHT, 0, i - rank))
    return order + [(WEIGHT, 0, i) for i in range(max(m - rank, 0), m)]


def second_zero_bubble(rank: int, p: int, m: int) -> list[Op]:
    """ZB-H2: forward passes until the first gradient comes back; weight gradients wait twice as long as in ZB-H1."""
    warm = min(2 * (p - rank) - 1, m)
    order: list[Op] = [(FORWARD, 0, i) for i in range(warm)]
    for i in range(m):
        order.append((BACKWARD, 0, i))
        if i >= 2 * rank:
            order.append((WEIGHT, 0, i - 2 * rank))
        if warm + i < m:
            order.append((FORWARD, 0, warm + i))
    return order + [(WEIGHT, 0, i) for i in range(max(m - 2 * rank, 0), m)]


def rank_order(schedule: Schedule, rank: int, p: int, m: int, v: int = 1, group: int = 0) -> list[Op]:
    """The work of one of ``p`` ranks on ``m`` micro-batches, in order."""
    if schedule == "interleaved":
        return interleaved(rank, p, m, v, group)
    if schedule == "gpipe":
        return gpipe(m)
    if schedule == "zb-h1":
        return zero_bubble(rank, p, m)
    return second_zero_bubble(rank, p, m) if schedule == "zb-h2" else one_forward_one_backward(rank, p, m)


def simulate(
    orders: list[list[Op]],
    forward: Sequence[float],
    backward: Sequence[float],
    v: int = 1,
    *,
    weight: Sequence[float] = (),
) -> Run:
    """Run fixed per-rank orders; chunk c of rank r is virtual stage c p + r, seconds are those of one virtual stage.

    ``weight`` are the seconds of W slots; ``backward`` is then without them.  Raises ValueError where ranks wait for
    each other for ever."""
    p, stages = len(orders), len(orders) * v
    m = 1 + max(micro for order in orders for _, _, micro in order)
    seconds = np.array([forward, backward, weight or [0.0] * stages])
    # Slot (kind, stage, micro-batch) has place (kind S + stage) m + micro-batch; the place behind all is always done.
    always = 3 * stages * m
    done: list[float | None] = [None] * always + [0.0]
    tables = [_slots(order, rank, p, m, stages, always) for rank, order in enumerate(orders)]
    lasts = [seconds[kinds, stage].tolist() for kinds, stage, _, _, _ in tables]
    lists = [(own.tolist(), first.tolist(), second.tolist()) for _, _, own, first, second in tables]
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, (own, first, second) in enumerate(lists):
            began, ended, last = starts[rank], ends[rank], lasts[rank]
            clock = ended[-1] if ended else 0.0
            for at in range(len(ended), len(own)):
                left, right = done[first[at]], done[second[at]]
                if left is None or right is None:
                    break
                start = max(clock, left, right)
                clock = start + last[at]
                done[own[at]] = clock
                began.append(start)
                ended.append(clock)
                moved = True
    if any(len(ended) < len(order) for ended, order in zip(ends, orders, strict=True)):
        raise ValueError(f"a schedule of {p} ranks, {v} chunks and {m} micro-batches waits for itself")
    return Run(orders, starts, ends, v)


_Table = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]


def _slots(order: list[Op], rank: int, p: int, m: int, stages: int, always: int) -> _Table:
    """(kind, stage, own place, places of the two slots that must be done before) of one rank's work."""
    kinds = np.array([_KINDS.index(kind) for kind, _, _ in order])
    stage = np.array([chunk for _, chunk, _ in order]) * p + rank
    micro = np.array([number for _, _, number in order])

    def place(kind: int | IntArray, where: IntArray) -> IntArray:
        return np.asarray((kind * stages + where) * m + micro)

    before = np.where(stage > 0, place(0, stage - 1), always)
    behind = np.where(stage < stages - 1, place(1, stage + 1), always)
    first = np.select([kinds == 0, kinds == 1], [before, place(0, stage)], place(1, stage))
    second = np.where(kinds == 1, behind, always)
    return kinds, stage, place(kinds, stage), first, second
