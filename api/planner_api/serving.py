"""Runs the application under uvicorn: its services start before the first connection and end after the last."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import structlog
import uvicorn
import uvloop

from planner.errors import InputError
from planner_api.app import create_app
from planner_api.guards.connections import guarded
from planner_api.metrics import Metrics
from planner_api.services import Services, running
from planner_api.settings import Settings

log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """Tells the services at the first signal, so that requests that wait for a plan are answered."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.end()
        super().handle_exit(sig, frame)


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
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(settings.header_timeout_s)),
            timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
            lifespan="off",  # what it would do is done here, where errors can be told
            http=guarded(settings.header_timeout_s, settings.connection_limit),
            ws="none",
        )
        host, port = listening.getsockname()[:2]
        log.info("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await _Server(config, services).serve(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as problem:
        raise InputError(
            f"the service cannot listen here: {problem.strerror or problem}",
            where="--host, --port",
            got=f"{host}:{port}",
            hint="choose another port, or end what uses it",
        ) from problem
    return listening
