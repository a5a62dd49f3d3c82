"""The decisions of one candidate as solver variables.

Where all layers are alike only a rank's total matters, so there is one count a rank; otherwise the boundaries of the virtual
stages are variables and prefix sums give each rank's layers of every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from planner.search.bounds import Needs
from planner.search.inner import Inner

Expr = Any
"""A linear expression of the solver, or an int."""


@dataclass(frozen=True)
class Variables:
    """Solver variables of one candidate; ``layers[rank][kind]`` and so on."""

    layers: list[list[Expr]]
    recomputed: list[list[Expr]]
    """Zero where recomputation is not open."""
    offloaded: list[list[Expr]]
    """offload steps * layers."""
    most: Expr
    """Recomputed layers of a virtual stage, at most."""
    step: Expr
    """The offloaded share is step / steps."""
    edges: list[Expr]
    """Layers before each virtual stage, and all of them at the end; empty where all layers are alike."""
    slowest: Expr
    """Time of the slowest rank, in time units."""
    tail: Expr
    """Longest tail of a rank, in objective units."""

    def hint(self, model: cp_model.CpModel, layout: list[int], ranks: list[int], most: int, step: int) -> None:
        """Tell the solver a known solution: its virtual stages, rank totals, recomputed layers and offload steps."""
        if self.edges:
            for index, edge in enumerate(self.edges[1:-1], start=1):
                model.add_hint(edge, sum(layout[:index]))
        else:
            for rank, held in enumerate(ranks):
                model.add_hint(self.layers[rank][0], held)
        for variable, value in ((self.most, most), (self.step, step)):
            if not isinstance(variable, int):
                model.add_hint(variable, value)


TIME_LIMIT_UNITS = 2**48
"""Domain of time variables; expressions are scaled to at most 2**40 units, so nothing reaches it."""


def make_variables(model: cp_model.CpModel, inner: Inner, needs: Needs) -> Variables:
    """Variables of the single candidate in ``inner``; integers where there is nothing to decide."""
    counted, steps = bool(inner.group.counted[0]), int(inner.group.steps[0])
    low, high = int(needs.step[0]), int(needs.most_steps[0])
    step: Expr = model.new_int_var(low, high, "step") if steps and low < high else low
    most: Expr = model.new_int_var(int(needs.recomputed[0]), inner.max_recomputed, "most") if counted else 0
    if len(inner.totals) == 1:
        layers, recomputed, edges = _alike(model, inner, counted)
    else:
        layers, recomputed, edges = _mixed(model, inner, most if counted else None)
    return Variables(
        layers=layers,
        recomputed=recomputed,
        offloaded=[[_times(model, step, count, inner.layers, high) for count in rank] for rank in layers],
        most=most,
        step=step,
        edges=edges,
        slowest=model.new_int_var(0, TIME_LIMIT_UNITS, "slowest"),
        tail=model.new_int_var(-TIME_LIMIT_UNITS, TIME_LIMIT_UNITS, "tail"),
    )


def _alike(model: cp_model.CpModel, inner: Inner, counted: bool) -> tuple[list[list[Expr]], list[list[Expr]], list[Expr]]:
    ranks, least = range(inner.group.pp), inner.group.vpp
    top = inner.layers - (inner.group.pp - 1) * least
    layers: list[list[Expr]] = [[model.new_int_var(least, top, f"layers[{rank}]")] for rank in ranks]
    recomputed: list[list[Expr]] = [[model.new_int_var(0, top, f"recomputed[{rank}]") if counted else 0] for rank in ranks]
    return layers, recomputed, []


def _mixed(
    model: cp_model.CpModel, inner: Inner, most: Expr | None
) -> tuple[list[list[Expr]], list[list[Expr]], list[Expr]]:
    stages, total = inner.stages, inner.layers
    edges: list[Expr] = [0]
    edges += [model.new_int_var(k, total - stages + k, f"edge[{k}]") for k in range(1, stages)]
    edges.append(total)
    before = [_prefix(model, inner, edge, f"edge[{k}]") for k, edge in enumerate(edges)]
    kinds, ranks = range(len(inner.totals)), range(inner.group.pp)
    held = [[before[s + 1][k] - before[s][k] for k in kinds] for s in range(stages)]
    again: list[list[Expr]] = [[0 for _ in kinds] for _ in range(stages)]
    if most is not None:
        for s in range(stages):
            count = model.new_int_var(1, inner.max_recomputed, f"count[{s}]")
            model.add_min_equality(count, [most, edges[s + 1] - edges[s]])
            end = model.new_int_var(1, total, f"end[{s}]")
            model.add(end == edges[s] + count)
            after = _prefix(model, inner, end, f"end[{s}]")
            again[s] = [after[k] - before[s][k] for k in kinds]
    of_rank = [[s for s in range(stages) if s % inner.group.pp == rank] for rank in ranks]

    def total_of(parts: list[list[Expr]]) -> list[list[Expr]]:
        return [[sum(parts[s][k] for s in of_rank[rank]) for k in kinds] for rank in ranks]

    return total_of(held), total_of(again), edges


def _prefix(model: cp_model.CpModel, inner: Inner, edge: Expr, name: str) -> list[Expr]:
    """Layers of each kind among the first ``edge``; the last kind is what remains."""
    if isinstance(edge, int):
        return [int(value) for value in inner.kind_prefix[edge]]
    parts: list[Expr] = []
    for kind in range(len(inner.totals) - 1):
        target = model.new_int_var(0, int(inner.totals[kind]), f"{name}.kind[{kind}]")
        model.add_element(edge, [int(value) for value in inner.kind_prefix[:, kind]], target)
        parts.append(target)
    return [*parts, edge - sum(parts)]


def _times(model: cp_model.CpModel, step: Expr, count: Expr, layers: int, most_steps: int) -> Expr:
    """The product of an offload step and a layer count; linear when the step is fixed."""
    if isinstance(step, int):
        return step * count
    product = model.new_int_var(0, layers * most_steps, "")
    model.add_multiplication_equality(product, [step, count])
    return product
