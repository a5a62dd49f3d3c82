"""Pipeline schedules: how much of the other stages' time is bubble, how many micro-batches are alive, what
stage-to-stage traffic costs.

Closed forms, checked in the tests against the event-by-event simulation of ``planner.cost.schedules``.  Sources: GPipe
and 1F1B arXiv 2104.04473, interleaved the same (section 2.2) and Megatron-LM's schedule, ZB-H1 and ZB-H2 arXiv
2401.10241."""

from __future__ import annotations

import numpy as np

from planner.cost.activations import output_gradient_share
from planner.cost.collectives import SECONDS, SENT_BYTES, Measure
from planner.cost.context import Work
from planner.cost.groups import Groups
from planner.specs.batch import SCHEDULES, FloatArray

GPIPE, INTERLEAVED, ZB_H1, ZB_H2 = (SCHEDULES.index(name) for name in ("gpipe", "interleaved", "zb-h1", "zb-h2"))

WEIGHT_GRADIENT_SHARE = 0.25
"""Share of the weight gradients in forward plus backward, profiled (arXiv 2401.10241, table 6: 0.20 to 0.27 at hidden
sizes 2304 to 6144); attention and elementwise kernels have none."""


def bubble_factor(work: Work) -> FloatArray:
    """Weight of the other ranks' micro-batch time in fill and drain: 1, 1/v interleaved.

    Fewer micro-batches than ranks cannot fill the chunks of the interleaved schedule: each takes p chunk times to come
    round, (p - m) + (m - 1) / v in all.  ZB-H1 fills the bubble with the weight gradients twice, F + B - 2W over F + B,
    the second time with those of the m - 1 micro-batches that wait for the drain.  ZB-H2 starts up to 2p - 1 forward
    passes on the first rank before their first gradient is due there, p F + (p - 1) B after the start with B = F:
    it idles while micro-batches are too few for that."""
    pp, vpp, schedule = work.batch.pp, work.batch.vpp, work.batch.schedule
    others, m = np.maximum(pp - 1.0, 1.0), work.micro_batches
    chunks = (np.maximum(pp - m, 0.0) + (np.minimum(m, pp) - 1.0) / vpp) / others
    factor = np.where(schedule == INTERLEAVED, chunks, 1.0)
    filled = 1.0 + np.minimum((m - 1.0) / others, 1.0)
    factor = np.where(schedule == ZB_H1, 1.0 - WEIGHT_GRADIENT_SHARE * filled, factor)
    one_pass = (1.0 - WEIGHT_GRADIENT_SHARE) / 2.0
    missing = np.maximum(2.0 * pp - 1.0 - m, 0.0)
    return np.where(schedule == ZB_H2, one_pass * missing / others, factor)


def rank_weights(work: Work) -> tuple[FloatArray, FloatArray]:
    """Weights of the slowest rank's micro-batch time and of all others' in a step: m and the bubble factor.

    With o ranks on a core those of an idle rank speed the others up: a step takes whichever is longer, all work on all
    cores (m micro-batches of the average rank's time) or the chain of m + factor (p - 1) of them at a whole core's
    speed, which is o times as fast."""
    ranks, m, pp, factor = work.context.cluster.ranks_per_core, work.micro_batches, work.batch.pp, bubble_factor(work)
    if ranks == 1.0:
        return m, factor
    chained = (m + factor * (pp - 1.0)) / ranks >= m
    shared = (pp > 1) & ~chained
    spread = m / pp
    return (
        np.where(pp == 1, m, np.where(shared, spread, m / ranks)),
        np.where(shared, spread, factor / ranks),
    )


def in_flight(work: Work, pp: int) -> FloatArray:
    """(N, P) micro-batches' worth of a rank's whole stage alive at the peak; rank 0 holds most."""
    m = work.micro_batches[:, None]
    rank, vpp = np.arange(pp)[None, :], work.batch.vpp[:, None]
    one_forward = np.minimum(m, pp - rank)
    chunks = 2 * (pp - rank - 1) + (vpp - 1) * interleaving_group(work)[:, None] + 1
    interleaved = np.minimum(m * vpp, chunks) / vpp
    schedule = work.batch.schedule[:, None]
    # ZB-H2 starts forward passes until the first backward pass comes back, twice as many as 1F1B.
    filled = np.minimum(m, 2 * (pp - rank) - 1)
    if work.context.backend.habits.even_in_flight:
        filled = np.broadcast_to(np.minimum(m, 2 * pp), one_forward.shape)
        one_forward = np.where(schedule == ZB_H1, np.minimum(m, pp), one_forward)
    alive = np.where(schedule == INTERLEAVED, interleaved, np.where(schedule == ZB_H2, filled, one_forward))
    waiting = waiting_weight_gradients(work, pp)
    if np.any(waiting):
        alive = alive + waiting * output_gradient_share(work)[:, None]
    return np.asarray(np.where(schedule == GPIPE, m, alive), dtype=float)


def interleaving_group(work: Work) -> FloatArray:
    """(N,) micro-batches that a rank takes through one chunk before it turns to the next: what the framework is told,
    p, or what equal rounds of at least p come to."""
    habits, m, pp = work.context.backend.habits, work.micro_batches, work.batch.pp
    if habits.equal_rounds:
        return np.asarray(m // np.maximum(m // pp, 1.0))
    return np.asarray(habits.interleaving_group or pp, dtype=float) + work.zeros()


def waiting_weight_gradients(work: Work, pp: int) -> FloatArray:
    """(N, P) micro-batches whose weight gradients are still to be computed, that in work included.

    The first rank has no input gradients to compute before, so its weight gradients do not wait."""
    rank = np.arange(pp)[None, :]
    waits = work.context.backend.habits.weight_gradients_wait and pp > 1
    zero_bubble = (work.batch.schedule[:, None] == ZB_H1) & (rank > 0)
    return np.where(zero_bubble & waits, np.minimum(work.micro_batches[:, None], rank + 1.0), 0.0)


def point_to_point_s(work: Work, groups: Groups) -> FloatArray:
    """Exposed stage-to-stage traffic of a step.

    Fill and drain pass every boundary once each way.  1F1B also waits for one exchange each way per micro-batch; the
    interleaved schedule overlaps those with other chunks' compute and pays the slow-down of running beside them.  Where
    an exchange makes the host wait, it costs a micro-batch what it takes to get the host ahead again."""
    context = work.context
    pp, vpp, m = work.batch.pp, work.batch.vpp, work.micro_batches
    send = _boundary(work, groups, SECONDS)
    fill = 2.0 * (pp - 1.0) * send
    steady = 2.0 * m * send
    overlapped = context.constants.overlap_slowdown * 2.0 * m * vpp * send
    exchanges = np.where(work.batch.schedule == INTERLEAVED, overlapped, steady)
    return np.where(pp > 1, fill + exchanges + m * context.constants.stage_sync_s, 0.0)


def sent_bytes(work: Work, groups: Groups) -> FloatArray:
    """What the rank with most neighbours sends in a step: its activations on, their gradients back, for every
    micro-batch and chunk; the first rank has no gradients to send for its first chunk, the last no activations of its
    last one."""
    pp, vpp = work.batch.pp, work.batch.vpp
    passes = 2.0 * vpp - np.where(pp == 2, 1.0, 0.0)
    return np.asarray(work.micro_batches * passes * _boundary(work, groups, SENT_BYTES))


def _boundary(work: Work, groups: Groups, measure: Measure) -> FloatArray:
    """The hidden vectors of one micro-batch on their way to the next stage."""
    size = work.context.activation_bytes * work.context.model.hidden * work.sp_tokens
    return measure.send(groups.pipeline, size)
