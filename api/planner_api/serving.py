"""Runs the application under uvicorn, with the limits of the connection itself."""

from __future__ import annotations

import sys

import uvicorn

from planner.errors import InputError
from planner_api.app import create_app
from planner_api.settings import Settings


def run(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C; InputError where the address or the database cannot be used."""
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=max(1, round(settings.header_timeout_s)),
        limit_concurrency=settings.connection_limit,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
        lifespan="on",
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = uvicorn.Server(config)
    try:
        server.run()
    except SystemExit:
        raise
    if not server.started:
        sys.exit(InputError.exit_code)
