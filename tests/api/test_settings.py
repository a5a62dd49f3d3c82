"""Settings that cannot be meant are refused by the name of their variable, and the service hears of its end in time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from planner.cli.serving import settings
from planner.errors import InputError
from planner_api import serving
from planner_api.settings import Settings, misspelt

OTHERS = (
    *("TOKEN", "URL", "WAIT_S", "PLAN_ID", "HEADER_FILE", "FAIL_OPEN", "ALLOW_PLAIN_HTTP", "DP", "TP", "PP", "DEBUG"),
    *("GRES", "VALIDATE_FOLDER", "VALIDATE_RUN", "NANOTRON_PATH", "KUBEFLOW_CRDS", "CLIENT_GENERATOR", "BACKEND"),
    *("PARSERS_PYTHON", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT"),
)
"""Variables of other parts of the product, and those that Kubernetes makes of a service called planner."""


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("PLANNER_WORKER", "3", "did you mean PLANNER_WORKERS?"),
        ("PLANNER_DATABASE_URI", "postgresql://a:secret@b/c", "did you mean PLANNER_DATABASE_URL?"),
        ("PLANNER_ALLOWED_HOSTS", "127.0.0.1:18417", "docs/service.md"),
        ("PLANNER_ALLOWED_HOSTS", "a.example.org,[::1]", "docs/service.md"),
        ("PLANNER_WORKERS", "x", "docs/service.md"),
    ],
)
def test_what_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError) as caught:
        settings()
    assert caught.value.where == variable
    assert hint in str(caught.value.hint)
    assert "secret" not in str(caught.value)


def test_variables_of_others_are_let_alone() -> None:
    assert misspelt(f"PLANNER_{name}" for name in OTHERS) is None
    assert misspelt(f"planner_{name}" for name in Settings.model_fields) is None


def test_names_of_hosts() -> None:
    assert Settings(allowed_hosts="Planner.example.org, *.internal,::1").hosts == (
        "planner.example.org",
        "*.internal",
        "::1",
    )


@pytest.mark.parametrize("host", ["999.1.1.1", "", "192.0.2.1"])
def test_an_address_that_is_none_of_this_machine(host: str) -> None:
    with pytest.raises(InputError) as caught:
        serving._listen(host, 0)
    assert caught.value.where == "PLANNER_HOST (--host)"
    assert "127.0.0.1" in str(caught.value.hint)


def test_a_port_in_use() -> None:
    with serving._listen("127.0.0.1", 0) as listening, pytest.raises(InputError) as caught:
        serving._listen("127.0.0.1", listening.getsockname()[1])
    assert caught.value.where == "PLANNER_PORT (--port)"


def test_a_signal_right_after_the_start_ends_it_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the line that it listens may end it at once."""
    told: list[str] = []

    class Log:
        def info(self, event: str, **_: Any) -> None:
            told.append(event)
            if event == "listening":
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody heard the signal"))
    try:
        monkeypatch.setattr(serving, "log", Log())
        serving.run(Settings(database_url=f"sqlite:///{tmp_path}/plans.db", port=0, workers=0))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["listening", "ending"]
