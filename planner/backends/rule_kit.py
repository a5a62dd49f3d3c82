"""Builders for rules: most limits of the frameworks are divisibilities, comparisons or facts about the model, and are
written as data.

A factor is a name that both the predicate and the equation read, so the number in an error message is the number that
was tested. Nothing here knows a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.backends.base import Limit, Rule, RuleContext
from planner.specs.batch import BoolArray, IntArray

Condition = Callable[[RuleContext], BoolArray]

COLUMNS = (
    "tp",
    "cp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "dp",
    "zero_stage",
    "shard_degree",
    "secondary_shard_degree",
    "micro_batch",
)
MAX_LISTED = 16
"""Longer lists of allowed values stop being read."""

_SCALARS: dict[str, Callable[[RuleContext], int]] = {
    "gpus": lambda c: c.cluster.gpus,
    "gpus_per_node": lambda c: c.cluster.local_gpus,
    "layers": lambda c: c.model.layers,
    "hidden": lambda c: c.model.hidden,
    "ffn": lambda c: c.model.ffn,
    "heads": lambda c: c.model.heads,
    "kv_heads": lambda c: c.model.kv_heads,
    "experts": lambda c: c.model.moe.experts if c.model.moe else 1,
    "expert_ffn": lambda c: c.model.moe.expert_ffn if c.model.moe else 0,
    "shared_ffn": lambda c: c.model.moe.shared_ffn if c.model.moe else 0,
    "vocab": lambda c: c.model.vocab,
    "learned_positions": lambda c: c.model.learned_positions,
    "seq_len": lambda c: c.job.seq_len,
    "global_batch": lambda c: c.job.global_batch,
}


def factor(context: RuleContext, name: str | int) -> IntArray:
    """The values of one factor, one per candidate."""
    if isinstance(name, int):
        return np.full(len(context.batch), name, dtype=np.int64)
    if name in COLUMNS:
        return np.asarray(getattr(context.batch, name), dtype=np.int64)
    if name == "micro_batches":
        return np.asarray(context.grad_accum, dtype=np.int64)
    return np.full(len(context.batch), _SCALARS[name](context), dtype=np.int64)


def product(context: RuleContext, names: tuple[str | int, ...]) -> IntArray:
    """The product of several factors, one per candidate."""
    total = np.ones(len(context.batch), dtype=np.int64)
    for name in names:
        total = total * factor(context, name)
    return total


def written(context: RuleContext, index: int, names: tuple[str | int, ...]) -> str:
    """Factors with their values: ``tp(8) * pp(4)``, in brackets when there are several."""
    parts = [str(name) if isinstance(name, int) else f"{name}({factor(context, name)[index]})" for name in names]
    return parts[0] if len(parts) == 1 else f"({' * '.join(parts)})"


def everywhere(context: RuleContext, value: bool) -> BoolArray:
    """The same truth for every candidate."""
    return np.full(len(context.batch), value, dtype=np.bool_)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors in rising order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return tuple(sorted({*small, *(number // k for k in small)}))


def divisible(
    rule_id: str,
    left: tuple[str | int, ...],
    right: tuple[str | int, ...],
    *,
    reason: str,
    source: str,
    when: Condition | None = None,
    vary: str | None = None,
) -> Rule:
    """``left % right = 0`` for the candidates where ``when`` is true; ``vary`` names the column whose legal values
    can be listed."""

    def holds(context: RuleContext) -> BoolArray:
        kept = np.asarray(product(context, left) % np.maximum(product(context, right), 1) == 0, dtype=np.bool_)
        return kept if when is None else kept | ~when(context)

    def equation(context: RuleContext, index: int) -> str:
        rest = int(product(context, left)[index] % product(context, right)[index])
        return f"{written(context, index, left)} % {written(context, index, right)} = {rest}, must be 0"

    return with_allowed(Rule(rule_id, reason, source, holds, equation), vary)


def at_most(
    rule_id: str,
    left: tuple[str | int, ...],
    right: tuple[str | int, ...],
    *,
    reason: str,
    source: str,
    when: Condition | None = None,
    vary: str | None = None,
) -> Rule:
    """``left <= right`` for the candidates where ``when`` is true."""

    def holds(context: RuleContext) -> BoolArray:
        kept = product(context, left) <= product(context, right)
        return kept if when is None else kept | ~when(context)

    def equation(context: RuleContext, index: int) -> str:
        return f"{written(context, index, left)} <= {written(context, index, right)} must hold"

    return with_allowed(Rule(rule_id, reason, source, holds, equation), vary)


def equal(rule_id: str, left: tuple[str | int, ...], right: tuple[str | int, ...], *, reason: str, source: str) -> Rule:
    """``left = right``."""

    def equation(context: RuleContext, index: int) -> str:
        value = product(context, left)[index]
        return f"{written(context, index, left)} = {value}, must be {written(context, index, right)}"

    return Rule(rule_id, reason, source, lambda c: product(c, left) == product(c, right), equation)


def predicate(
    rule_id: str,
    holds: Condition,
    equation: Callable[[RuleContext, int], str],
    *,
    reason: str,
    source: str,
    vary: str | None = None,
    limit: Limit = "framework",
) -> Rule:
    """A rule with its own predicate and sentence."""
    return with_allowed(Rule(rule_id, reason, source, holds, equation, limit=limit), vary)


def input_rule(
    rule_id: str,
    accepts: Callable[[RuleContext], bool],
    says: Callable[[RuleContext], str],
    *,
    reason: str,
    source: str,
    allowed: str | None = None,
    limit: Limit = "framework",
) -> Rule:
    """A limit on model, cluster or job alone: it keeps or refuses all candidates together."""
    listing = None if allowed is None else (lambda _context, _index: allowed)
    return Rule(
        rule_id,
        reason,
        source,
        lambda c: everywhere(c, accepts(c)),
        lambda context, _index: says(context),
        listing,
        limit,
    )


def with_allowed(rule: Rule, column: str | None) -> Rule:
    """The rule with the list of values of ``column`` that it accepts, the other degrees staying as they are.

    The values are found by evaluating the rule itself, so the list can never contradict it.
    """
    if column is None:
        return rule

    def allowed(context: RuleContext, index: int) -> str:
        numbers = {"micro_batch": context.job.global_batch, "vpp": context.model.layers}
        values = np.array(divisors(numbers.get(column, context.cluster.gpus)), dtype=np.int64)
        rows = context.batch.take(np.full(len(values), index)).with_values(**{column: values})
        legal = values[rule.holds(replace(context, batch=rows))]
        if len(legal) == 0:
            return f"no {column} with these other values"
        shown = ", ".join(str(value) for value in legal[:MAX_LISTED])
        return f"{column} in {shown}" + (", ..." if len(legal) > MAX_LISTED else "")

    return replace(rule, allowed=allowed)
