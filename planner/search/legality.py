"""Applying a backend's rules while candidates are still being multiplied out.

A rule is applied as soon as the columns that it reads are decided, so that a bad tensor-parallel degree is refused
once and not for every micro-batch.  Which columns a rule reads is observed, not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from planner.backends.base import Rule, RuleContext
from planner.cost.context import CostContext
from planner.specs.batch import BoolArray, StrategyBatch


def carry_on() -> None:
    """There is time."""


COLUMNS = frozenset(column.name for column in fields(StrategyBatch))


@dataclass(frozen=True)
class Refusal:
    """A rule with a candidate that breaks it."""

    rule: Rule
    context: RuleContext
    row: int

    @property
    def equation(self) -> str:
        return self.rule.equation(self.context, self.row)

    @property
    def allowed(self) -> str | None:
        return self.rule.allowed(self.context, self.row) if self.rule.allowed is not None else None


def refusals(context: CostContext, batch: StrategyBatch) -> list[Refusal]:
    """Every rule that a batch of one row breaks, in the backend's order."""
    facts = RuleContext(context.model, context.cluster, context.job, batch, context.recompute_kinds)
    return [Refusal(rule, facts, 0) for rule, broken in context.backend.broken_rules(facts) if broken[0]]


def columns_read(rule: Rule, context: RuleContext) -> frozenset[str]:
    """Names of the batch columns that the rule looks at, found by running it on a batch that takes notes."""
    seen: set[str] = set()

    class Noting(StrategyBatch):
        def __getattribute__(self, name: str) -> Any:
            if name in COLUMNS:
                seen.add(name)
            return super().__getattribute__(name)

    # Two different rows, so that a rule that looks further only if some degree exceeds 1 shows what it reads.
    rule.holds(replace(context, batch=Noting(**_two_rows(context))))
    return frozenset(seen)


def _two_rows(context: RuleContext) -> dict[str, Any]:
    ones = {
        name: np.array([1, 2], dtype=np.int64)
        for name in COLUMNS - {"sequence_parallel", "offload_optimizer", "stage_layers"}
    }
    zeros = {
        name: np.array([0, 1], dtype=np.int64)
        for name in ("schedule", "recompute_kind", "offload_device", "offload_parameters")
    }
    zeros["recompute_kind"] = np.array([0, len(context.kinds) - 1], dtype=np.int64)
    layers = np.zeros((2, 4), dtype=np.int64)
    layers[0, 0] = layers[1, 0] = context.model.layers
    return {
        **ones,
        **zeros,
        "sequence_parallel": np.array([False, True]),
        "offload_optimizer": np.array([0.0, 1.0]),
        "stage_layers": layers,
    }


@dataclass
class Legality:
    """Rules still to be applied, what has been rejected so far, and an example of the latest rejection."""

    context: RuleContext
    """Its batch is replaced by the candidates at hand."""
    pending: list[tuple[Rule, frozenset[str]]]
    rejected: dict[str, int] = field(default_factory=dict)
    give_up: Callable[[], None] = carry_on
    """Called between two rules: raises where there is no time for more."""
    refusals: list[Refusal] = field(default_factory=list)
    """One for each rule that rejected something in the latest step that did, most rejections first."""

    @classmethod
    def of(cls, rules: Iterable[Rule], context: RuleContext, give_up: Callable[[], None] = carry_on) -> Legality:
        return cls(context, [(rule, columns_read(rule, context)) for rule in rules], give_up=give_up)

    def filter(self, batch: StrategyBatch, decided: Iterable[str]) -> StrategyBatch:
        """The candidates that keep every rule that looks at ``decided`` columns only; each such rule is used up."""
        return self.apply(self.ready(decided), batch)

    def ready(self, decided: Iterable[str]) -> list[Rule]:
        """The rules that look at ``decided`` columns only; they are no longer pending."""
        known = frozenset(decided)
        ready = [rule for rule, columns in self.pending if columns <= known]
        self.pending = [(rule, columns) for rule, columns in self.pending if not columns <= known]
        return ready

    def apply(self, rules: Iterable[Rule], batch: StrategyBatch) -> StrategyBatch:
        """The candidates that keep these rules; a candidate is counted under the first rule that it breaks."""
        if len(batch) == 0:
            return batch
        context = replace(self.context, batch=batch)
        legal: BoolArray = np.ones(len(batch), dtype=np.bool_)
        found: list[tuple[int, Refusal]] = []
        for rule in rules:
            self.give_up()
            broken = legal & ~rule.holds(context)
            count = int(broken.sum())
            if count:
                self.rejected[rule.id] = self.rejected.get(rule.id, 0) + count
                found.append((count, Refusal(rule, context, int(np.argmax(broken)))))
                legal &= ~broken
        if found:
            self.refusals = [refusal for _, refusal in sorted(found, key=lambda item: -item[0])]
        return batch if legal.all() else batch.take(legal)

    def count(self, name: str, number: int) -> None:
        """Count rejections that no backend rule made."""
        if number:
            self.rejected[name] = self.rejected.get(name, 0) + number
