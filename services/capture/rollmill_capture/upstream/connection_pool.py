"""A transport for very many connections: the cost of a call does not grow with their number.

httpcore's pool looks at all its connections, for each of them again, whenever a call begins or ends. Here each
connection is a lane, a transport of its own with room for one; the lane used last is used next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

Origin = tuple[str, str, int | None]


class PooledTransport(httpx.AsyncBaseTransport):
    """``make`` gives a transport for one connection; a call beyond ``lanes`` waits for a lane, however long."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport], *, lanes: int, idle_seconds: float) -> None:
        self._make = make
        self._room = asyncio.Semaphore(lanes)
        self._idle_seconds = idle_seconds
        self._free: dict[Origin, deque[tuple[float, httpx.AsyncBaseTransport]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = (request.url.scheme, request.url.host, request.url.port)
        await self._room.acquire()
        lane = self._lane(origin)
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            await self._leave(origin, lane)
            raise
        if not isinstance(response.stream, httpx.AsyncByteStream):
            raise TypeError("an asynchronous transport answers with an asynchronous stream")
        response.stream = _PooledStream(response.stream, lambda: self._leave(origin, lane))
        return response

    async def aclose(self) -> None:
        for lanes in self._free.values():
            while lanes:
                await lanes.pop()[1].aclose()

    def _lane(self, origin: Origin) -> httpx.AsyncBaseTransport:
        free = self._free.setdefault(origin, deque())
        return free.pop()[1] if free else self._make()

    async def _leave(self, origin: Origin, lane: httpx.AsyncBaseTransport) -> None:
        """The lane is free again; the one that has been free for longest is closed when that is long ago."""
        now, free = time.monotonic(), self._free[origin]
        free.append((now, lane))
        self._room.release()
        if free[0][0] < now - self._idle_seconds:
            await free.popleft()[1].aclose()


class _PooledStream(httpx.AsyncByteStream):
    """A body that frees its lane when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, leave: Callable[[], Awaitable[None]]) -> None:
        self._body = body
        self._leave: Callable[[], Awaitable[None]] | None = leave

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece

    async def aclose(self) -> None:
        leave, self._leave = self._leave, None
        try:
            await self._body.aclose()
        finally:
            if leave is not None:
                await leave()
