"""HTTP to upstreams, for httpx: a pool of very many connections, on asyncio and the parser that uvicorn uses too.

httpx's own transport passes every chunk of a stream through three layers of Python; a proxy of streams spends most of
its time there. Here a chunk costs one callback, and chunks that arrived together are handed over together. httpcore's
pool looks at all its connections, for each of them again, whenever a call begins or ends; here the cost of a call does
not grow with their number.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import httptools
import httpx

Origin = tuple[str, str, int | None]
"""Scheme, host and port."""

HIGH_WATER = 2**20
"""Bytes of a reply that wait to be taken; beyond them the connection is not read."""
STALE_SECONDS = 1.0
"""A kept connection that ends within this time after a request, without a byte, was closed before it."""
FIRST_FINAL_STATUS = 200
"""Statuses below are no answer yet."""
BODILESS = (204, 304)


class BrokenResponseError(httpx.TransportError):
    """The server took the request, and its answer never came or broke off: asking again would sample again."""


class PooledTransport(httpx.AsyncBaseTransport):
    """``make`` gives a transport for one connection; a call beyond ``max_connections`` waits, however long.

    The connection used last is used next.
    """

    def __init__(
        self, make: Callable[[], httpx.AsyncBaseTransport], *, max_connections: int, idle_seconds: float
    ) -> None:
        self._make = make
        self._slots = asyncio.Semaphore(max_connections)
        self._idle_seconds = idle_seconds
        self._idle: dict[Origin, deque[tuple[float, httpx.AsyncBaseTransport]]] = {}
        """With the time since when each is idle; the longest first."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = (request.url.scheme, request.url.host, request.url.port)
        await self._slots.acquire()
        idle = self._idle.setdefault(origin, deque())
        transport = idle.pop()[1] if idle else self._make()
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await self._release(origin, transport)
            raise
        if not isinstance(response.stream, httpx.AsyncByteStream):
            raise TypeError("an asynchronous transport answers with an asynchronous stream")
        response.stream = _PooledStream(response.stream, lambda: self._release(origin, transport))
        return response

    async def aclose(self) -> None:
        for idle in self._idle.values():
            while idle:
                await idle.pop()[1].aclose()

    async def _release(self, origin: Origin, transport: httpx.AsyncBaseTransport) -> None:
        """The connection is idle again; the one that has been so for longest is closed after ``idle_seconds``."""
        now, idle = time.monotonic(), self._idle[origin]
        idle.append((now, transport))
        self._slots.release()
        if idle[0][0] < now - self._idle_seconds:
            await idle.popleft()[1].aclose()


class _PooledStream(httpx.AsyncByteStream):
    """A body that releases its connection when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, release: Callable[[], Awaitable[None]]) -> None:
        self._body = body
        self._release: Callable[[], Awaitable[None]] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        release, self._release = self._release, None
        try:
            await self._body.aclose()
        finally:
            if release is not None:
                await release()


class HttpTransport(httpx.AsyncBaseTransport):
    """One connection, one call at a time; it is kept between calls where the server allows it."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._connection: _Connection | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        connection = self._connection
        if connection is None or connection.lost:
            connection = self._connection = await self._connect(request, timeouts.get("connect"))
        try:
            connection.send(_head(request) + await request.aread())
            await connection.wait_for_head(timeouts.get("read"))
        except BaseException:
            await self.aclose()
            raise
        body = _Body(self, connection, timeouts.get("read"))
        return httpx.Response(connection.status, headers=connection.headers, stream=body)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _connect(self, request: httpx.Request, seconds: float | None) -> _Connection:
        url, secure = request.url, request.url.scheme == "https"
        try:
            async with asyncio.timeout(seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection,
                    url.host,
                    url.port or (443 if secure else 80),
                    ssl=self._tls if secure else None,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time", request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return connection


class _Connection(asyncio.Protocol):
    """``status`` and ``headers`` of the answer that is being read; its body is taken chunk by chunk."""

    def __init__(self) -> None:
        self.lost = False
        self.complete = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = False
        self._has_length = False
        self._keeps_alive = False
        self._received = False
        self._calls = 0
        self._sent_at = 0.0
        self._chunks: list[bytes] = []
        self._size = 0
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self, data: bytes) -> None:
        if self._transport is None or self.lost:
            raise httpx.WriteError("the server has closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self.complete = self._has_head = self._has_length = self._received = False
        self._calls, self._sent_at = self._calls + 1, asyncio.get_running_loop().time()
        self.status, self.headers = 0, []
        self._transport.write(data)

    async def wait_for_head(self, seconds: float | None) -> None:
        """Raises httpx.ReadTimeout; httpx.RemoteProtocolError on a stale connection; else BrokenResponseError."""
        while not self._has_head:
            self._raise_if_broken("the server closed the connection without an answer")
            await self._wait_for_progress(seconds)

    async def next_chunk(self, seconds: float | None) -> bytes:
        """The part of the body that came since the last time; empty: the end. Raises as ``wait_for_head``."""
        while not self._chunks:
            if self.complete:
                return b""
            self._raise_if_broken("the server closed the connection in the middle of its answer")
            await self._wait_for_progress(seconds)
        chunks, self._chunks, self._size = self._chunks, [], 0
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def reusable(self) -> bool:
        return self.complete and self._has_length and self._keeps_alive and not self.lost

    def close(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self.complete and not self._has_head:
            self.close()  # an answer without a request
            return
        self._received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._failure = f"the server's answer is no HTTP: {error}"
        if self._size > HIGH_WATER and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._has_head and not self._has_length:
            self.complete = True  # its end is the end of the body
        elif error is not None:
            self._failure = self._failure or f"the connection broke: {error}"
        self._wake()

    # the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < FIRST_FINAL_STATUS:
            self.headers, self._has_length = [], False
        else:
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.complete = True
            self._keeps_alive = bool(self._parser.should_keep_alive())  # known at this moment only
            self._has_length = self._has_length or self.status in BODILESS

    def _raise_if_broken(self, message: str) -> None:
        if self._failure is None and not self.lost:
            return
        late = asyncio.get_running_loop().time() - self._sent_at > STALE_SECONDS
        stale = self._calls > 1 and not self._received and not late
        raise (httpx.RemoteProtocolError if stale else BrokenResponseError)(self._failure or message)

    async def _wait_for_progress(self, seconds: float | None) -> None:
        """Wait for anything to come. A bare timer: `asyncio.timeout` costs as much as the rest of a small chunk."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _expire, waiter, seconds)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Body(httpx.AsyncByteStream):
    """A body. Closed after its end, it leaves the connection open for the next call; before, it closes it."""

    def __init__(self, owner: HttpTransport, connection: _Connection, seconds: float | None) -> None:
        self._owner = owner
        self._connection = connection
        self._seconds = seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self._connection.next_chunk(self._seconds):
            yield chunk

    async def aclose(self) -> None:
        if not self._connection.reusable():
            await self._owner.aclose()


def _expire(waiter: asyncio.Future[None], seconds: float) -> None:
    if not waiter.done():
        waiter.set_exception(httpx.ReadTimeout(f"nothing came for {seconds:g} s"))


def _head(request: httpx.Request) -> bytes:
    lines = [b"%b: %b\r\n" % (name, value) for name, value in request.headers.raw]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.url.raw_path, b"".join(lines))
