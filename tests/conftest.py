"""Settings of all tests: golden files change only on request, and property tests draw the same cases each run."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` rewrites tests/golden/expected and the README example instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite expected texts from what is printed now")
