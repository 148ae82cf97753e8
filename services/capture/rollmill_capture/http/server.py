"""The HTTP server inside the application: it leaves signals to it, and stops when the calls in flight are done.

Nobody needs a key to open a connection, so a request has to come within a time: its head, and then its body.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rollmill.errors import ConfigurationError
from rollmill_capture.errors import ApiError
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


@dataclass(frozen=True)
class BodyDeadline:
    """Around an application: a request with a body that does not come in time ends with 408."""

    app: ASGIApp
    seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline, more = loop.time() + self.seconds, True

        async def receive_in_time() -> Message:
            nonlocal more
            if not more:
                return await receive()  # the client's leaving, whenever that is
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                more = False
                raise ApiError(408, f"the request's body did not come within {self.seconds:g} s") from error
            more = bool(message.get("more_body", False))
            return message

        await self.app(scope, receive_in_time, send)


class _HeadDeadline(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # which of two it is depends on what is installed
    """A connection on which the head of a request is not there in time is closed.

    uvicorn's own time-out is for connections that are idle after a request; the next first byte ends it.
    """

    def __init__(self, seconds: float, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_seconds = seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        """Runs from the first byte on, and not anew with each further one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self._close_late)

    def _stop_waiting(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _close_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


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
        BodyDeadline(app, settings.body_seconds),
        http=partial(_HeadDeadline, settings.header_seconds),  # type: ignore[arg-type]  # it is called, like a class
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
