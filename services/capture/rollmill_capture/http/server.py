"""The HTTP server inside the application: it leaves signals to it, and stops when the calls in flight are done."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from rollmill.errors import ConfigurationError
from rollmill_capture.settings import CaptureSettings

KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of common clients keep a connection, so that the clients close it."""
BACKLOG = 4096
SERVER_SHARE = 0.6
"""Of the time to drain, for calls in flight; the rest is for what comes after the server."""


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the application's."""
        yield


def listen(settings: CaptureSettings) -> socket.socket:
    """A listening socket. Raises ConfigurationError where the address is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"capture cannot listen on {settings.host}:{settings.port}: {error.strerror}; set ROLLMILL_PORT"
        ) from error


async def serve(app: ASGIApp, listener: socket.socket, settings: CaptureSettings, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then finish the requests in flight."""
    server = Server(_config(app, settings))
    running = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await running
    finally:
        stopping.cancel()
        running.cancel()


def _config(app: ASGIApp, settings: CaptureSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, int(settings.drain_seconds * SERVER_SHARE)),
    )
