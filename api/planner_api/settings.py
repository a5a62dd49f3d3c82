"""How the service runs: every setting with its default, from ``PLANNER_*`` in the environment.

``create_app`` takes a ``Settings``; nothing else reads the environment."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}


def default_database() -> str:
    """A file of this user's: plans survive a restart without anything being set up."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"sqlite:///{quote(state)}/planner/planner.db"


def _url(text: str) -> URL:
    # What hosting services hand out begins with postgres://, which SQLAlchemy does not take.
    return make_url(text.replace("postgres://", "postgresql://", 1))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


def _is_bare(name: str) -> bool:
    """Whether a name is one that a Host header can hold beside its port; with ``*`` it is a pattern."""
    if re.fullmatch(r"[\w.*?-]+", name):
        return True
    try:
        return ipaddress.ip_address(name).version == 6
    except ValueError:
        return False


class Settings(BaseSettings):
    """What an operator can set."""

    model_config = SettingsConfigDict(env_prefix="PLANNER_", extra="ignore", frozen=True)

    database_url: str = Field(default_factory=default_database, repr=False)
    """``sqlite:///FILE`` for one process, ``postgresql://USER:PASSWORD@HOST/DATABASE`` for several."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: int = Field(default=1, ge=0, le=256)
    """Plans that this process solves at once, each in a process of its own; 0: it only answers requests."""
    solve_time_limit_s: float = Field(default=300.0, gt=0, le=86_400)
    """Longest search; a request may ask for less."""
    solve_memory_bytes: int = Field(default=4 * 1024**3, ge=512 * 1024**2)
    """Memory that one search may take."""
    quick_time_limit_s: float = Field(default=20.0, gt=0, le=3600)
    """Longest estimate, check, rendering or calibration, which are answered in the request."""
    quick_wait_s: float = Field(default=1.0, ge=0, le=60)
    """How long a request for a plan is held before it is answered with 202."""
    longest_wait_s: float = Field(default=60.0, ge=0, le=600)
    """Most that ``Prefer: wait`` gets."""
    queue_limit: int = Field(default=200, ge=1, le=1_000_000)
    """Plans that may wait; more are answered with 503."""
    lost_after_s: float = Field(default=30.0, ge=2, le=3600)
    """A plan whose worker has not been heard of for so long is given to another."""
    result_lifetime_s: float = Field(default=30 * 86_400.0, ge=60)
    """Finished plans are kept for so long."""
    cache_bytes: int = Field(default=64 * 1024**2, ge=0)
    """Memory for finished plans that are asked for again."""
    body_limit_bytes: int = Field(default=2 * 1024**2, ge=1024, le=1024**3)
    body_timeout_s: float = Field(default=20.0, gt=0, le=600)
    """Time in which a request's body must have arrived."""
    header_timeout_s: float = Field(default=15.0, gt=0, le=600)
    """Time in which a request's head must have arrived, and between two requests of one connection."""
    connection_limit: int = Field(default=1000, ge=1, le=100_000)
    """Connections that may be open; more are answered with 503."""
    rate_limit: str = "1200/minute"
    """Requests of one token, or without one of one address, to this process; empty: no limit."""
    trusted_proxies: str = "127.0.0.1,::1"
    """Addresses and networks, with commas, whose ``X-Forwarded-For`` says who asks."""
    require_tokens: bool | None = None
    """None: everywhere but on loopback."""
    allowed_hosts: str = ""
    """Names under which the service is reached, with commas (``planner.example.org,*.internal``); empty: on loopback
    the loopback names, else any."""
    log_format: Literal["json", "console"] = "json"
    shutdown_grace_s: float = Field(default=20.0, ge=0, le=3600)
    """How long running searches may go on after the service was asked to end; then they are put back."""

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        try:
            name = _url(value).get_backend_name()
        except (ArgumentError, ValueError):
            raise ValueError("this is not a database URL (sqlite:///FILE or postgresql://...)") from None
        if name not in DRIVERS:
            raise ValueError("the database is neither SQLite nor PostgreSQL")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _known_addresses(cls, value: str) -> str:
        try:
            for address in filter(None, map(str.strip, value.split(","))):
                ipaddress.ip_network(address)
        except ValueError:
            raise ValueError("this is no list of addresses and networks (10.0.0.5,10.1.0.0/16)") from None
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _bare_names(cls, value: str) -> str:
        odd = next((name for name in _names(value) if not _is_bare(name)), None)
        if odd is not None:
            raise ValueError(f"{odd} is no name of a host: names stand here without scheme, port and brackets")
        return value

    @property
    def database(self) -> URL:
        """The URL with the driver that is used."""
        url = _url(self.database_url)
        return url.set(drivername=DRIVERS[url.get_backend_name()])

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def tokens_required(self) -> bool:
        return not self.on_loopback if self.require_tokens is None else self.require_tokens

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names that are answered; a browser on this machine can be made to send any other to loopback."""
        return _names(self.allowed_hosts) or (LOOPBACK if self.on_loopback else ("*",))


NEAR = 0.8
"""Names this alike are one that was misspelt; those of other parts of the product are further away."""


def misspelt(variables: Iterable[str]) -> tuple[str, str] | None:
    """The first variable that is no setting but nearly is one, and that setting."""
    prefix = Settings.model_config["env_prefix"]
    known = [name.upper() for name in Settings.model_fields]
    for variable in sorted(variables):
        name = variable.upper().removeprefix(prefix)
        if variable.upper().startswith(prefix) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
            if near:
                return variable, prefix + near[0]
    return None
