"""Runs the application under uvicorn: its services start before the first connection and end after the last."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI

from planner.errors import InputError
from planner.specs.problems import shown
from planner_api.app import create_app
from planner_api.guards.connections import guarded
from planner_api.metrics import Metrics
from planner_api.services import Services, running
from planner_api.settings import Settings

log = structlog.get_logger(__name__)


BACKLOG = 2048
"""Connections that may wait to be taken."""
EXIT_HURRIED = 130
"""Of a service that was told twice to end."""


class _Server(uvicorn.Server):
    """Ends with its services at the first signal, and at once at the second: what is lost then is found at the next
    start."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def hear_signals(self) -> None:
        """To be called before anybody is told that the service is there."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_end)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again when it has ended, and searches would have no grace."""
        yield

    def _told_to_end(self) -> None:
        if self.should_exit:
            os._exit(EXIT_HURRIED)
        log.info("ending", grace_s=self._services.settings.shutdown_grace_s)
        self._services.end()
        self.should_exit = True


def run(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C; InputError where the address or the database cannot be used."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    metrics = Metrics()
    app = create_app(settings, metrics)
    listening = _listen(settings.host, settings.port)
    async with running(settings, metrics) as services:
        app.state.services = services
        server = _Server(configured(app, settings, metrics), services)
        server.hear_signals()
        host, port = listening.getsockname()[:2]
        log.info("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listening])


def configured(app: FastAPI, settings: Settings, metrics: Metrics) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_keep_alive=max(1, round(settings.header_timeout_s)),
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
        lifespan="off",  # what it would do is done here, where errors can be told
        http=guarded(settings.header_timeout_s, settings.connection_limit, metrics.refused),
        ws="none",
    )


def _listen(host: str, port: int) -> socket.socket:
    listening: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as problem:
        if listening is not None:
            listening.close()
        raise _cannot_listen(problem, host, port) from problem
    return listening


def _cannot_listen(problem: OSError, host: str, port: int) -> InputError:
    told = f"the service cannot listen here: {problem.strerror or problem}"
    if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
        return InputError(
            told,
            where="PLANNER_HOST (--host)",
            got=shown(host),
            allowed="an address of this machine",
            hint="for example 127.0.0.1 for this machine alone, or 0.0.0.0 for its network",
        )
    return InputError(
        told,
        where="PLANNER_PORT (--port)",
        got=f"{host}:{port}",
        allowed="a port that nobody uses",
        hint="choose another port, or end what uses it",
    )
