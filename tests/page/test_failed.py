"""A plan whose search has failed is shown as one: looking at it again starts nothing."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from sqlalchemy import update

from planner_api.storage.tables import plans
from tests.api.conftest import in_process

ADDRESS = "/?model=llama-3.1-8b&gpu=h100&gpus=8"


def test_looking_again_starts_nothing(tmp_path: Path) -> None:
    """What the page asks while it waits, with scripts and without, is the plan and not the question."""

    async def look() -> None:
        async with in_process(tmp_path, workers=0) as (client, app):
            waiting = await client.get(ADDRESS)
            again = re.search(r'class="making"[^>]*hx-get="([^"]+)"', waiting.text)
            assert again is not None
            refresh = re.search(r'http-equiv="refresh" content="\d+; url=([^"]+)"', waiting.text)
            assert refresh is not None
            assert again[1] == refresh[1]
            plan = again[1].removeprefix("/plans/")
            services = app.state.services
            async with services.database.begin() as db:
                await db.execute(update(plans).where(plans.c.id == plan).values(state="failed", finished_at=1e12))
            for headers in ({}, {"HX-Request": "true"}):
                shown = await client.get(again[1], headers=headers)
                assert "making" not in shown.text
                row = await services.plans.get(plan)
                assert row.state == "failed"
            # Asked again by its question it is made anew.
            await client.get(ADDRESS)
            assert (await services.plans.get(plan)).state == "queued"

    asyncio.run(look())
