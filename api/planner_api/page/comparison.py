"""What a change of the question changed: the figures of a plan beside those of the one that it started from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.service.words import strategy_text
from planner.specs.plan import PlanDocument
from planner.units import duration, gib, percent


@dataclass(frozen=True)
class Difference:
    """One figure, before and now."""

    name: str
    before: str
    now: str
    change: str
    better: bool | None
    """None where neither is."""


def differences(base: PlanDocument, now: PlanDocument) -> list[Difference]:
    """The figures that people decide by."""
    old, new = base.best.estimate, now.best.estimate
    rows = [
        _row("step time", old.step_time_s, new.step_time_s, duration, less_is_better=True),
        _row("tokens/s", old.tokens_per_s, new.tokens_per_s, lambda value: f"{value:,.0f}", less_is_better=False),
        _row(
            "tokens/s of a GPU",
            old.tokens_per_s_per_gpu,
            new.tokens_per_s_per_gpu,
            lambda value: f"{value:,.0f}",
            less_is_better=False,
        ),
        _row("peak memory", old.peak_memory_bytes, new.peak_memory_bytes, gib, less_is_better=True),
        _row("MFU", old.mfu, new.mfu, percent, less_is_better=False),
    ]
    if old.cost_per_million_tokens is not None and new.cost_per_million_tokens is not None:
        money = (old.cost_per_million_tokens, new.cost_per_million_tokens)
        rows.append(_row("cost of a million tokens", *money, lambda value: f"${value:.3g}", less_is_better=True))
    strategies = (strategy_text(base.best), strategy_text(now.best))
    rows.append(
        Difference("strategy", *strategies, "the same" if strategies[0] == strategies[1] else "another", better=None)
    )
    return rows


def _row(name: str, before: float, now: float, shown: Callable[[float], str], *, less_is_better: bool) -> Difference:
    change = now / before - 1 if before else 0.0
    better = None if abs(change) < 0.005 else (change < 0) == less_is_better
    return Difference(name, shown(before), shown(now), f"{100 * change:+.1f} %", better)
