"""The decisions of one candidate as solver variables, in one of three forms.

Where layers come as a run of one kind, perhaps after a short run of another (dense layers before a mixture of
experts), only the first few virtual stages differ and every other one counts by its rank's total: ``RunForm``, linear
and free of symmetric copies. Otherwise the boundaries of the stages are variables, and prefix sums give each stage's
layers of every kind: ``EdgeForm``; its relaxation ``CountForm`` bounds it quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.search.bounds import Needs
from planner.search.inner import Inner
from planner.specs.batch import IntArray

Expr = Any
"""A linear expression of the solver, or an int."""

TIME_LIMIT_UNITS = 2**40
"""Domain of time variables; expressions are scaled to at most about 2**30 units, so nothing reaches it."""


@dataclass(frozen=True)
class Head:
    """A virtual stage that may hold layers of the leading kind: ``lead`` of them, then ``main`` of the other kind."""

    lead: Expr
    main: Expr
    again_lead: Expr
    again: Expr
    """Recomputed layers, of the leading kind and in all: min(most, layers)."""


@dataclass(frozen=True)
class Share:
    """What a rank holds in its virtual stages of the main kind alone."""

    stages: int
    """How many such stages it has."""
    layers: Expr
    recomputed: Expr


@dataclass(frozen=True)
class RunForm:
    """Identity: layers = leading run over ``heads`` + main run over ``heads`` and ``shares``."""

    heads: list[Head]
    shares: list[Share]


@dataclass(frozen=True)
class EdgeForm:
    """``edges[k]`` layers lie before virtual stage k."""

    edges: list[Expr]


@dataclass(frozen=True)
class CountForm:
    """A relaxation of ``EdgeForm``: layers of each kind on each rank, as if stages need not be contiguous."""


Counts = list[list[Expr]]
"""By rank or virtual stage, then by kind."""
Stages = tuple[Counts, Counts] | None
"""Layers and recomputed layers of every virtual stage; None where only the ranks' are known."""

Form = RunForm | EdgeForm | CountForm


@dataclass(frozen=True)
class Variables:
    """Solver variables of one candidate; ``layers[rank][kind]`` and so on."""

    form: Form
    layers: list[list[Expr]]
    recomputed: list[list[Expr]]
    """Zero where recomputation is not open."""
    stages: Stages
    most: Expr
    """Recomputed layers of a virtual stage, at most."""
    step: Expr
    """The offloaded share is step / steps."""
    slowest: Expr
    """Time of the slowest rank, of each chunk where a rank has several, in time units."""
    tail: Expr
    """Longest tail of a rank, in objective units."""
    offloaded: list[list[Expr]] = field(default_factory=list)
    """offload step * layers."""


def leading_run(inner: Inner) -> int | None:
    """Layers of another kind before the main run; None if the kinds alternate."""
    totals = inner.totals
    if len(totals) == 1:
        return 0
    lead = int(totals[0])
    return lead if len(totals) == 2 and int(inner.kind_prefix[lead, 0]) == lead else None


def make_variables(model: cp_model.CpModel, inner: Inner, needs: Needs, *, relaxed: bool = False) -> Variables:
    """Variables of the single candidate in ``inner``; integers where there is nothing to decide.

    ``relaxed`` asks for ``CountForm`` where the kinds of layers alternate.
    """
    steps, low, high = int(inner.group.steps[0]), int(needs.step[0]), int(needs.most_steps[0])
    step: Expr = model.new_int_var(low, high, "step") if steps and low < high else low
    counted = bool(inner.group.counted[0])
    most: Expr = model.new_int_var(int(needs.recomputed[0]), inner.max_recomputed, "most") if counted else 0
    lead = leading_run(inner)
    form: Form
    if lead is None and relaxed:
        form, layers, recomputed, stages = _count_form(model, inner, counted)
    elif lead is None:
        form, layers, recomputed, stages = _edge_form(model, inner, most if counted else None)
    else:
        form, layers, recomputed, stages = _run_form(model, inner, lead, most if counted else None)
    offloaded = [[_times(model, step, count, inner.layers, high) for count in rank] for rank in layers]
    slowest = model.new_int_var(0, TIME_LIMIT_UNITS, "slowest")
    tail = model.new_int_var(-TIME_LIMIT_UNITS, TIME_LIMIT_UNITS, "tail")
    return Variables(form, layers, recomputed, stages, most, step, slowest, tail, offloaded)


Built = tuple[Form, Counts, Counts, Stages]


def _run_form(model: cp_model.CpModel, inner: Inner, lead: int, most: Expr | None) -> Built:
    ranks, main = range(inner.group.pp), int(inner.totals[-1])
    # With several chunks a rank, how it splits its layers over them matters: every stage is explicit.
    explicit = inner.stages if inner.group.vpp > 1 else min(lead, inner.stages)
    heads = [_head(model, inner, lead if s < lead else 0, most, s) for s in range(explicit)]
    shares = []
    for rank in ranks:
        stages = len(range(rank, inner.stages, inner.group.pp)) - len(range(rank, len(heads), inner.group.pp))
        full = min(stages * inner.max_recomputed, main)
        layers: Expr = model.new_int_var(stages, full, f"layers[{rank}]") if stages else 0
        again: Expr = model.new_int_var(0, main, f"recomputed[{rank}]") if stages and most is not None else 0
        shares.append(Share(stages, layers, again))
    held, recomputed = [], []
    for rank in ranks:
        mine = heads[rank :: inner.group.pp]
        held.append([sum(h.lead for h in mine), sum(h.main for h in mine) + shares[rank].layers])
        again_lead = sum(h.again_lead for h in mine)
        recomputed.append([again_lead, sum(h.again for h in mine) - again_lead + shares[rank].recomputed])
    first = 0 if len(inner.totals) == 2 else 1
    by_stage: Stages = None
    if len(heads) == inner.stages:
        again = [[head.again_lead, head.again - head.again_lead][first:] for head in heads]
        by_stage = [[head.lead, head.main][first:] for head in heads], again
    return RunForm(heads, shares), [row[first:] for row in held], [row[first:] for row in recomputed], by_stage


def _head(model: cp_model.CpModel, inner: Inner, lead: int, most: Expr | None, stage: int) -> Head:
    full = inner.max_recomputed
    leading: Expr = model.new_int_var(0, min(lead, full), f"lead[{stage}]") if lead else 0
    rest = model.new_int_var(0, min(int(inner.totals[-1]), full), f"main[{stage}]")
    if most is None:
        return Head(leading, rest, 0, 0)
    again_lead: Expr = model.new_int_var(0, lead, f"again_lead[{stage}]") if lead else 0
    again = model.new_int_var(0, full, f"again[{stage}]")
    if lead:
        model.add_min_equality(again_lead, [most, leading])
    model.add_min_equality(again, [most, leading + rest])
    return Head(leading, rest, again_lead, again)


def _count_form(model: cp_model.CpModel, inner: Inner, counted: bool) -> Built:
    totals, ranks = [int(total) for total in inner.totals], range(inner.group.pp)
    layers: list[list[Expr]] = [
        [model.new_int_var(0, n, f"layers[{r}][{k}]") for k, n in enumerate(totals)] for r in ranks
    ]
    again: list[list[Expr]] = [
        [model.new_int_var(0, n, f"again[{r}][{k}]") if counted else 0 for k, n in enumerate(totals)] for r in ranks
    ]
    return CountForm(), layers, again, None


def _edge_form(model: cp_model.CpModel, inner: Inner, most: Expr | None) -> Built:
    stages, total = inner.stages, inner.layers
    full, least = inner.max_recomputed, inner.group.least_layers
    behind = [int(least[k:].sum()) for k in range(stages + 1)]
    span = [(max(k, total - (stages - k) * full), min(total - behind[k], k * full)) for k in range(stages)]
    span.append((total, total))
    edges: list[Expr] = [0, *(model.new_int_var(*span[k], f"edge[{k}]") for k in range(1, stages)), total]
    before = [_prefix(model, inner, edge, *span[k]) for k, edge in enumerate(edges)]
    kinds, ranks = range(len(inner.totals)), range(inner.group.pp)
    held = [[before[s + 1][k] - before[s][k] for k in kinds] for s in range(stages)]
    again: list[list[Expr]] = [[0 for _ in kinds] for _ in range(stages)]
    if most is not None:
        for s in range(stages):
            count = model.new_int_var(int(least[s]), full, f"count[{s}]")
            model.add_min_equality(count, [most, edges[s + 1] - edges[s]])
            low, high = span[s][0] + int(least[s]), span[s + 1][1]
            end = model.new_int_var(low, high, f"end[{s}]")
            model.add(end == edges[s] + count)
            after = _prefix(model, inner, end, low, high)
            again[s] = [after[k] - before[s][k] for k in kinds]

    def total_of(parts: list[list[Expr]]) -> list[list[Expr]]:
        return [[sum(part[k] for part in parts[rank :: inner.group.pp]) for k in kinds] for rank in ranks]

    return EdgeForm(edges), total_of(held), total_of(again), (held, again)


def _prefix(model: cp_model.CpModel, inner: Inner, edge: Expr, low: int, high: int) -> list[Expr]:
    """Layers of each kind among the first ``edge`` in [low, high]; the last kind is what remains.

    One literal a value: with the few values an edge can have, stronger than the solver's element constraint.
    """
    if isinstance(edge, int):
        return [int(value) for value in inner.kind_prefix[edge]]
    places = range(low, high + 1)
    chosen = [model.new_bool_var("") for _ in places]
    model.add_exactly_one(chosen)
    model.add(sum(place * literal for place, literal in zip(places, chosen, strict=True)) == edge)
    parts: list[Expr] = []
    for kind in range(len(inner.totals) - 1):
        before = [int(inner.kind_prefix[place, kind]) for place in places]
        parts.append(sum(count * literal for count, literal in zip(before, chosen, strict=True)))
    return [*parts, edge - sum(parts)]


def _times(model: cp_model.CpModel, step: Expr, count: Expr, layers: int, most_steps: int) -> Expr:
    """The product of an offload step and a layer count; linear when one of them is fixed."""
    if isinstance(step, int) or isinstance(count, int):
        return step * count
    product = model.new_int_var(0, layers * most_steps, "")
    model.add_multiplication_equality(product, [step, count])
    return product


def add_hint(
    model: cp_model.CpModel, variables: Variables, inner: Inner, layout: IntArray, most: int, step: int
) -> None:
    """Tell the solver a known solution: virtual stages, recomputed layers, offload steps."""
    pairs: list[tuple[Expr, int]] = [(variables.most, most), (variables.step, step)]
    ends = np.cumsum(layout)
    if isinstance(variables.form, EdgeForm):
        pairs += list(zip(variables.form.edges[1:], (int(end) for end in ends), strict=True))
    elif isinstance(variables.form, RunForm):
        lead, heads = leading_run(inner) or 0, variables.form.heads
        for s, head in enumerate(heads):
            leading = max(0, min(int(ends[s]), lead) - int(ends[s] - layout[s]))
            pairs += [(head.lead, leading), (head.main, int(layout[s]) - leading)]
        for rank, share in enumerate(variables.form.shares):
            mine = [s for s in range(rank, inner.stages, inner.group.pp) if s >= len(heads)]
            pairs.append((share.layers, int(layout[mine].sum())))
    for variable, value in pairs:
        if not isinstance(variable, int):
            model.add_hint(variable, value)
