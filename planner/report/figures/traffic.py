from __future__ import annotations

from planner.cost.context import CostContext
from planner.specs.batch import StrategyBatch
from planner.specs.pictures import Traffic
from planner.specs.plan import Plan


def traffic(plan: Plan, context: CostContext, batch: StrategyBatch) -> tuple[Traffic, ...]:
    return ()
