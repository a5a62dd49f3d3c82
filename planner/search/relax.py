"""When nothing fits: the candidate that misses by the least, and the smallest changes of the question that make a
plan exist.

Every change that is offered has been searched and a plan was found; a change that does not help is not mentioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from planner.cost.evaluate import CostContext
from planner.errors import InputError
from planner.search.bounds import Needs, full_bound
from planner.search.capacity import host_steps
from planner.search.inner import prepare
from planner.search.outcome import InfeasibleReport, NearestMiss, Relaxation
from planner.search.problem import Problem
from planner.search.space import Space

MAX_RELAXATIONS = 3
GPU_DOUBLINGS = 8
SEQUENCE_HALVINGS = 6
MIN_SEQUENCE = 512

Feasible = Callable[[Problem], bool]


def explain_infeasible(problem: Problem, space: Space, rejected: dict[str, int], feasible: Feasible) -> InfeasibleReport:
    """The report of a search that found nothing; ``feasible`` answers whether a changed question has a plan."""
    found: list[Relaxation] = []
    for relaxation, changed in _changes(problem, feasible):
        found.append(relaxation)
        del changed
        if len(found) == MAX_RELAXATIONS:
            break
    return InfeasibleReport(rejected, nearest_miss(problem.context, space), tuple(found))


def nearest_miss(context: CostContext, space: Space) -> NearestMiss | None:
    """The candidate whose least possible memory exceeds its limit by the smallest share."""
    best: tuple[float, NearestMiss] | None = None
    upper = context.memory_upper
    for group in space.groups:
        for start in range(0, len(group), 20_000):
            inner = prepare(context, group.take(slice(start, start + 20_000)))
            most = host_steps(inner)
            steps = np.where(most < np.minimum(inner.group.steps, 1), inner.group.steps, np.maximum(most, 0))
            everything = np.full(len(inner), inner.max_recomputed)
            needs = Needs(inner.group.counted.astype(np.int64), steps, steps)
            relaxed = full_bound(inner, needs).memory_bytes
            priced = inner.price(np.arange(len(inner)), inner.group.batch.stage_layers, everything, steps)
            needed = np.maximum(relaxed, np.where(group.free, 0.0, priced.peak_memory_bytes)) * upper
            sizes = {"gpu": needed / context.memory_limit_bytes,
                     "host": priced.host_memory_bytes_per_node / context.host_memory_limit_bytes}  # fmt: skip
            worst = np.maximum(sizes["gpu"], sizes["host"])
            row = int(worst.argmin())
            if best is None or worst[row] < best[0]:
                where: Literal["gpu", "host"] = "gpu" if sizes["gpu"][row] >= sizes["host"][row] else "host"
                values = {"gpu": (needed[row], context.memory_limit_bytes),
                          "host": (priced.host_memory_bytes_per_node[row], context.host_memory_limit_bytes)}  # fmt:
                          skip
                size, limit = (float(value) for value in values[where])
                strategy = inner.decided(row, inner.group.batch.stage_layers[row], inner.max_recomputed, int(steps[row]))
                best = float(worst[row]), NearestMiss(strategy, size - limit, where, size, limit)
    return best[1] if best is not None else None


def _changes(problem: Problem, feasible: Feasible) -> Iterator[tuple[Relaxation, Problem]]:
    """Changes that lead to a plan, the least intrusive kind first, at most one of each kind but pins."""
    for kind in (_without_a_pin, _other_backends, _more_gpus, _shorter_sequences):
        for relaxation, changed in kind(problem):
            if _has_plan(changed, feasible):
                yield relaxation, changed
                if relaxation.field != "pin":
                    break


def _has_plan(problem: Problem, feasible: Feasible) -> bool:
    try:
        return feasible(problem)
    except (InputError, ValueError):
        return False


def _without_a_pin(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    for name, value in problem.pins.items():
        pins: Mapping[str, int | str | bool] = {key: held for key, held in problem.pins.items() if key != name}
        text = f"leave {name} open: a plan fits without the pin {name}={value}"
        yield Relaxation("pin", name, text), replace(problem, pins=pins)


def _other_backends(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    from planner.backends import BACKENDS

    for name, backend in BACKENDS.items():
        if name != problem.context.backend.name:
            text = f"use {backend.title}: a plan fits with --backend {name}"
            yield Relaxation("backend", name, text), replace(problem, context=replace(problem.context, backend=backend))


def _more_gpus(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    cluster = problem.context.cluster
    for doubling in range(1, GPU_DOUBLINGS + 1):
        gpus = cluster.gpus * 2**doubling
        if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
            continue
        larger = cluster.model_copy(update={"gpus": gpus})
        text = f"use more GPUs: a plan fits on {gpus} ({larger.nodes} nodes) with --gpus {gpus}"
        yield Relaxation("gpus", str(gpus), text), replace(problem, context=replace(problem.context, cluster=larger))


def _shorter_sequences(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    job = problem.context.job
    for halving in range(1, SEQUENCE_HALVINGS + 1):
        length = job.seq_len // 2**halving
        if length < MIN_SEQUENCE or job.seq_len % 2**halving:
            return
        shorter = job.model_copy(update={"seq_len": length})
        text = f"use shorter sequences: a plan fits with --seq-len {length}"
        yield Relaxation("seq_len", str(length), text), replace(problem, context=replace(problem.context, job=shorter))
