"""Headless Chromium for tests that open a page, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


# One a module: what drives it holds an event loop while it lives, beside which other tests could not run theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser; each test opens windows of its own."""
    if not CHROMIUM.is_file():
        pytest.skip(f"{CHROMIUM} is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield running
        running.close()
