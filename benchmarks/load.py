"""Load for a chat completions endpoint: streams on kept connections, timed from request to the marks of the reply."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import cast

END = b"0\r\n\r\n"
DONE = b"[DONE]"
TOKEN = b"word"
FEWEST = 12
"""Calls of a level."""
LATEST_SECONDS = 30.0
"""After the last call began; what is not there then counts as failed."""


@dataclass(frozen=True)
class Timing:
    """Seconds from the request: to the first token's frame, to the last token's, to the end of the reply."""

    first: float
    last: float
    end: float


@dataclass
class Measured:
    timings: list[Timing] = field(default_factory=list)
    failures: int = 0
    seconds: float = 0.0

    def first_ms(self, share: float) -> float:
        return 1000 * quantile([timing.first for timing in self.timings], share)

    def ending_ms(self, share: float) -> float:
        """From the last token to the end."""
        return 1000 * quantile([timing.end - timing.last for timing in self.timings], share)


class Connection(asyncio.Protocol):
    """One stream after the other."""

    def __init__(self) -> None:
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[bool] | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self.lost = True
        self._end(whole=False)

    async def call(self, request: bytes) -> Timing | None:
        """None: it failed."""
        self._first = self._last = 0.0
        self._done, self._tail = False, b""
        self._ended = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        if self._transport is None or self.lost:
            return None
        self._transport.write(request)
        whole = await self._ended
        if not whole or not self._first:
            return None
        return Timing(self._first - began, self._last - began, time.perf_counter() - began)

    def data_received(self, data: bytes) -> None:
        if TOKEN in data:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        seen = self._tail + data
        self._done = self._done or DONE in seen
        self._tail = seen[-16:]
        if seen.endswith(END):
            self._end(whole=self._done)

    def _end(self, *, whole: bool) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(whole)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Endpoint:
    """``request`` gives the bytes of call n."""

    def __init__(self, port: int, request: Callable[[int], bytes]) -> None:
        self._port = port
        self._request = request
        self._idle: list[Connection] = []
        self._numbers = count()

    async def warm(self, connections: int) -> None:
        made = [await self._connect() for _ in range(connections)]
        await asyncio.gather(*(connection.call(self._request(next(self._numbers))) for connection in made))
        self._idle += [connection for connection in made if not connection.lost]

    async def call(self, into: Measured) -> None:
        connection = await self._ready()
        timing = await connection.call(self._request(next(self._numbers)))
        if timing is None:
            into.failures += 1
            connection.close()
            return
        into.timings.append(timing)
        self._idle.append(connection)

    async def _ready(self) -> Connection:
        """One that the server has not closed meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
        return await self._connect()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return connection


async def open_loop(endpoint: Endpoint, streams: int, stream_seconds: float, seconds: float) -> Measured:
    """Calls begin at even intervals, so many that ``streams`` of them run at once, whatever becomes of the others."""
    measured, gap = Measured(), stream_seconds / streams
    running: list[asyncio.Task[None]] = []
    with quiet():
        began = time.perf_counter()
        for number in range(max(int(seconds / gap), FEWEST)):
            await asyncio.sleep(max(began + number * gap - time.perf_counter(), 0.0))
            running.append(asyncio.create_task(endpoint.call(measured)))
        _, late = await asyncio.wait(running, timeout=LATEST_SECONDS)
        measured.failures += len(late)
        measured.seconds = time.perf_counter() - began
    for call in late:
        call.cancel()
    return measured


async def closed_loop(endpoint: Endpoint, workers: int, seconds: float) -> Measured:
    """``workers`` calls at once, each followed by the next: as fast as it goes."""
    measured = Measured()
    end = time.perf_counter() + seconds

    async def work() -> None:
        while time.perf_counter() < end:
            await endpoint.call(measured)

    with quiet():
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(workers)))
        measured.seconds = time.perf_counter() - began
    return measured


@contextmanager
def quiet() -> Iterator[None]:
    """Without garbage collection in the one that measures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")
