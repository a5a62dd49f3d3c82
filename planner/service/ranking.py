"""The table of ranked plans as text cells: terminal, page and report show the same columns and digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from planner.service.why import largest_loss
from planner.service.words import recompute_text
from planner.specs.plan import Plan
from planner.units import memory_unit

LOSS = "largest loss"
"""Header of the column that narrow screens go without."""


class Column(NamedTuple):
    """Head of a column."""

    name: str
    justify: Literal["left", "right"]


class Ranking(NamedTuple):
    """Columns that say something of these plans, and a row a plan; the first cell is the rank."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def ranking(plans: Sequence[Plan]) -> Ranking:
    """The table of ``plans``, best first; columns of degrees that all plans leave at 1 are left out."""
    unit_name, unit = memory_unit(max(plan.estimate.peak_memory_bytes for plan in plans))
    rows = [_row(rank, plan, unit) for rank, plan in enumerate(plans, start=1)]
    columns = _columns(unit_name)
    shown = [
        index
        for index, (_, optional) in enumerate(columns)
        if not optional or any(row[index] not in ("1", "-") for row in rows)
    ]
    return Ranking(tuple(columns[i][0] for i in shown), tuple(tuple(row[i] for i in shown) for row in rows))


def _columns(unit: str) -> tuple[tuple[Column, bool], ...]:
    """Every column, and whether it is left out when all its values are 1 or absent."""
    return (
        (Column("", "right"), False),
        (Column("backend", "left"), False),
        (Column("TP", "right"), False),
        (Column("SP", "left"), True),
        (Column("CP", "right"), True),
        (Column("PP", "right"), False),
        (Column("VPP", "right"), True),
        (Column("EP", "right"), True),
        (Column("DP", "right"), False),
        (Column("ZeRO", "right"), False),
        (Column("mbs", "right"), False),
        (Column("recompute", "left"), False),
        (Column("step s", "right"), False),
        (Column("tok/s", "right"), False),
        (Column("MFU %", "right"), False),
        (Column(unit, "right"), False),
        (Column(LOSS, "left"), False),
    )


def _row(rank: int, plan: Plan, unit: float) -> tuple[str, ...]:
    s, e = plan.strategy, plan.estimate
    loss, share = largest_loss(plan)
    recompute = s.recompute.mode if s.recompute.mode != "full" else recompute_text(s.recompute)
    return (
        str(rank),
        plan.backend,
        str(s.tp),
        "-" if s.tp == 1 else ("yes" if s.sequence_parallel else "no"),
        str(s.cp),
        str(s.pp),
        str(s.vpp),
        str(s.ep),
        str(s.dp),
        str(s.zero_stage),
        str(s.micro_batch),
        recompute + (" +off" if s.offload.device != "none" else ""),
        f"{e.step_time_s:.3g}" if e.step_time_s < 100 else f"{e.step_time_s:.0f}",
        f"{e.tokens_per_s_per_gpu:,.0f}",
        f"{100 * e.mfu:.1f}",
        f"{e.peak_memory_bytes / unit:.1f}",
        f"{loss} {100 * share:.0f}%" if share else loss,
    )
