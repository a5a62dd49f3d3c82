"""When nothing fits: the candidate that misses by the least, and the smallest changes of the question that make a
plan exist.

Every change that is offered has been searched and a plan was found; a change that does not help is not mentioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from planner.cost.evaluate import CostContext
from planner.errors import InputError, TimeLimitError
from planner.search.capacity import host_steps
from planner.search.inner import prepare
from planner.search.outcome import InfeasibleReport, NearestMiss, Relaxation
from planner.search.problem import Problem
from planner.search.space import Group, Space
from planner.units import GIB

MAX_RELAXATIONS = 3
HOST_DOUBLINGS = 2
"""How often a node's memory is doubled in search of a plan."""

GPU_DOUBLINGS = 8
JOB_DOUBLINGS = 12
SIZES_BETWEEN = 6
"""Numbers of nodes tried between two doublings."""
SEQUENCE_HALVINGS = 6
MIN_SEQUENCE = 512
USUAL_PRECISION = "bf16"
CORES_AT_ONCE = 2_000

Feasible = Callable[[Problem], bool]


def explain_infeasible(
    problem: Problem, space: Space, rejected: dict[str, int], feasible: Feasible
) -> InfeasibleReport:
    """The report of a search that found nothing; ``feasible`` answers whether a changed question has a plan, and
    raises TimeLimitError when the changes that were found until then have to do."""
    nearest = nearest_miss(problem.context, space)
    found: list[Relaxation] = []
    try:
        found.extend(islice(_changes(problem, feasible, by_rules=nearest is None), MAX_RELAXATIONS))
    except TimeLimitError:
        return InfeasibleReport(rejected, nearest, tuple(found), complete=False)
    return InfeasibleReport(rejected, nearest, tuple(found))


def nearest_miss(context: CostContext, space: Space) -> NearestMiss | None:
    """The candidate that exceeds its limit by the smallest share, with the framework's default split of the layers; of
    those looked at until the space raised TimeLimitError."""
    best: tuple[float, NearestMiss] | None = None
    with suppress(TimeLimitError):
        for core in space.cores:
            for start in range(0, len(core), CORES_AT_ONCE):
                group = space.variants(core.take(slice(start, start + CORES_AT_ONCE)))
                found = _nearest(context, group) if len(group) else None
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
    return best[1] if best is not None else None


def _nearest(context: CostContext, group: Group) -> tuple[float, NearestMiss]:
    """(needed over limit, the miss) of the nearest of some candidates; recomputes and offloads all that it can."""
    inner = prepare(context, group)
    most = host_steps(inner)
    steps = np.where(most < np.minimum(group.steps, 1), group.steps, np.maximum(most, 0))
    layouts, everything = group.batch.stage_layers, np.full(len(inner), inner.max_recomputed)
    priced = inner.price(np.arange(len(inner)), layouts, everything, steps)
    gpu, host = priced.peak_memory_bytes * context.memory_upper, priced.host_memory_bytes_per_node
    over_gpu, over_host = gpu / context.memory_limit_bytes, host / context.host_memory_limit_bytes
    row = int(np.maximum(over_gpu, over_host).argmin())
    strategy = inner.decided(row, layouts[row], inner.max_recomputed, int(steps[row]))
    if over_gpu[row] >= over_host[row]:
        share, needed, limit = float(over_gpu[row]), float(gpu[row]), context.memory_limit_bytes
        return share, NearestMiss(strategy, needed - limit, "gpu", needed, limit)
    share, needed, limit = float(over_host[row]), float(host[row]), context.host_memory_limit_bytes
    return share, NearestMiss(strategy, needed - limit, "host", needed, limit)


Kind = Callable[[Problem], Iterator[tuple[Relaxation, Problem]]]


def _changes(problem: Problem, feasible: Feasible, *, by_rules: bool) -> Iterator[Relaxation]:
    """Changes that lead to a plan, the least intrusive kind first, at most one of each kind but pins; ``by_rules`` says
    that rules refuse every candidate, and none is too large."""
    larger = partial(_more_gpus, feasible=feasible)
    kinds: tuple[Kind, ...] = (_without_a_pin, _compared_backends, _more_host_memory, larger, _shorter_sequences)
    if by_rules:
        kinds = (_without_a_pin, _loss_left_open, _other_precision, _every_backend, larger, _shorter_sequences)
    helped = False
    for kind in kinds:
        for relaxation, changed in kind(problem):
            if _has_plan(changed, feasible):
                yield relaxation
                helped = True
                if relaxation.field != "pin":
                    break
    if not helped:
        yield from islice((change for change, job in _larger_jobs(problem) if _has_plan(job, feasible)), 1)


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


def _loss_left_open(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    """The implementation of the loss that the framework has."""
    job = problem.context.job
    if job.loss != "auto":
        text = "leave the loss to the framework: a plan fits with --loss auto"
        yield Relaxation("loss", "auto", text), _with_job(problem, loss="auto")


def _other_precision(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    """The format that every framework trains in."""
    if problem.context.job.precision != USUAL_PRECISION:
        text = f"use another number format: a plan fits with --precision {USUAL_PRECISION}"
        yield Relaxation("precision", USUAL_PRECISION, text), _with_job(problem, precision=USUAL_PRECISION)


def _with_job(problem: Problem, **values: object) -> Problem:
    job = problem.context.job.model_copy(update=values)
    return replace(problem, context=replace(problem.context, job=job))


def _compared_backends(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    """The frameworks that plans are compared over."""
    from planner.backends import COMPARED

    return _other_backends(problem, COMPARED)


def _every_backend(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    """These, then those that are only used when they are asked for: what rules refuse is seen at once."""
    from planner.backends import BACKENDS, COMPARED

    return _other_backends(problem, dict.fromkeys([*COMPARED, *BACKENDS]))


def _other_backends(problem: Problem, names: Iterable[str]) -> Iterator[tuple[Relaxation, Problem]]:
    from planner.backends import BACKENDS

    for name in names:
        backend = BACKENDS[name]
        if name != problem.context.backend.name:
            text = f"use {backend.title}: a plan fits with --backend {name}"
            yield Relaxation("backend", name, text), replace(problem, context=replace(problem.context, backend=backend))


def _more_host_memory(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    """Host memory is the cheapest thing to add; it helps where processes or offloaded states do not fit."""
    cluster = problem.context.cluster
    for doubling in range(1, HOST_DOUBLINGS + 1):
        size_gib = -(-cluster.host_memory_bytes_per_node // GIB) * 2**doubling
        larger = cluster.model_copy(update={"host_memory_bytes_per_node": size_gib * GIB})
        text = f"give every node more memory: a plan fits with --host-memory-gib {size_gib}"
        changed = replace(problem, context=replace(problem.context, cluster=larger))
        yield Relaxation("host_memory_gib", str(size_gib), text), changed


def _more_gpus(problem: Problem, feasible: Feasible) -> Iterator[tuple[Relaxation, Problem]]:
    """Doublings, and below the first that helps the numbers of nodes between, the smallest first."""
    cluster = problem.context.cluster
    per_node = cluster.gpus_per_node
    last = cluster.gpus
    for doubling in range(1, GPU_DOUBLINGS + 1):
        gpus = cluster.gpus * 2**doubling
        if gpus > per_node and gpus % per_node:
            continue
        if _has_plan(_with_gpus(problem, gpus)[1], feasible):
            between = range(last // per_node + 1, gpus // per_node)
            # A number that leaves the batch indivisible has no plan; a handful of sizes is enough to see.
            for nodes in between[:: -(-len(between) // SIZES_BETWEEN) or 1]:
                yield _with_gpus(problem, nodes * per_node)
            yield _with_gpus(problem, gpus)
            return
        last = gpus


def _with_gpus(problem: Problem, gpus: int) -> tuple[Relaxation, Problem]:
    larger = problem.context.cluster.model_copy(update={"gpus": gpus})
    nodes = "1 node" if larger.nodes == 1 else f"{larger.nodes} nodes"
    text = f"use more GPUs: a plan fits on {gpus} ({nodes}) with --gpus {gpus}"
    return Relaxation("gpus", str(gpus), text), replace(problem, context=replace(problem.context, cluster=larger))


def _larger_jobs(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    """More GPUs than the batch has sequences, with a multiple of it: few sequences keep few replicas busy, however many
    GPUs there are."""
    cluster, job = problem.context.cluster, problem.context.job
    for doubling in range(1, JOB_DOUBLINGS + 1):
        gpus = cluster.gpus * 2**doubling
        batch = job.global_batch * -(-gpus // job.global_batch)
        if batch == job.global_batch or (gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node):
            continue
        changed = _with_gpus(problem, gpus)[1]
        larger = job.model_copy(update={"global_batch": batch})
        text = f"use more GPUs and a larger batch: a plan fits with --gpus {gpus} --global-batch {batch}"
        yield Relaxation("gpus", str(gpus), text), replace(changed, context=replace(changed.context, job=larger))


def _shorter_sequences(problem: Problem) -> Iterator[tuple[Relaxation, Problem]]:
    job = problem.context.job
    for halving in range(1, SEQUENCE_HALVINGS + 1):
        length = job.seq_len // 2**halving
        if length < MIN_SEQUENCE or job.seq_len % 2**halving:
            return
        text = f"use shorter sequences: a plan fits with --seq-len {length}"
        yield Relaxation("seq_len", str(length), text), _with_job(problem, seq_len=length)
