"""Housekeeping: results and keys that are past their time are removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from planner_api.storage.idempotency import IdempotencyStore
from planner_api.storage.plans import PlanStore

log = structlog.get_logger(__name__)

EVERY_S = 300.0


@asynccontextmanager
async def keep_house(plans: PlanStore, keys: IdempotencyStore, result_lifetime_s: float) -> AsyncIterator[None]:
    """Remove what is old now and every few minutes while the body runs."""

    async def keep() -> None:
        while True:
            try:
                removed = await plans.forget(result_lifetime_s)
                await keys.forget()
                if removed:
                    log.info("old plans removed", plans=removed)
            except Exception:
                log.exception("housekeeping failed")
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
