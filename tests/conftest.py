"""Settings of all tests: golden files change only on request, and property tests draw the same cases each run."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.parsers.matrix import PROPERTY, Row, table

pytest_plugins = ["tests.browser", "tests.postgres"]

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` rewrites tests/golden/expected and the README example instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite expected texts from what is printed now")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the frameworks' own parsers read and refused, after a run that asked them."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    rows = [
        Row.model_validate_json(str(value))
        for report in reports
        if report.when == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    lines = list(table(rows))
    if lines:
        terminalreporter.section("rendered files and the frameworks' own parsers")
        for line in lines:
            terminalreporter.write_line(line)
