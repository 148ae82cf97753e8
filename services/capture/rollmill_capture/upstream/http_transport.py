"""One connection to an upstream, for httpx: asyncio below it, and the parser that uvicorn uses too.

httpx's own transport passes every chunk of a stream through three layers of Python; a proxy of streams spends most of
its time there. Here a chunk costs one callback, and chunks that arrived together are handed over together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import cast

import httptools
import httpx

HIGH_WATER = 2**20
"""Bytes of a reply that nobody has taken yet; beyond them the connection is not read."""
STALE_SECONDS = 1.0
"""A kept connection that ends within this time after a request, without a byte, was closed before it."""
CONTINUES = 200
"""Statuses below are no answer yet."""
BODILESS = (204, 304)


class BrokenResponseError(httpx.TransportError):
    """The server took the request, and its answer never came or broke off: asking again would sample again."""


class HttpTransport(httpx.AsyncBaseTransport):
    """One call at a time; the connection is kept between calls where the server allows it."""

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
            await connection.answered(timeouts.get("read"))
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
    """``status`` and ``headers`` of the answer that is being read; its body is taken piece by piece."""

    def __init__(self) -> None:
        self.lost = False
        self.complete = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answered = False
        self._sized = False
        self._keeps = False
        self._heard = False
        self._calls = 0
        self._sent_at = 0.0
        self._pieces: list[bytes] = []
        self._size = 0
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self, data: bytes) -> None:
        if self._transport is None or self.lost:
            raise httpx.WriteError("the server has closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self.complete = self._answered = self._sized = self._heard = False
        self._calls, self._sent_at = self._calls + 1, asyncio.get_running_loop().time()
        self.status, self.headers = 0, []
        self._transport.write(data)

    async def answered(self, seconds: float | None) -> None:
        """Wait for the head of the answer.

        Raises httpx.ReadTimeout; httpx.RemoteProtocolError where the connection was stale; else BrokenAnswerError.
        """
        while not self._answered:
            self._check("the server closed the connection without an answer")
            await self._moved(seconds)

    async def piece(self, seconds: float | None) -> bytes:
        """What has come of the body since the last time; empty: that was all. Raises as ``answered``."""
        while not self._pieces:
            if self.complete:
                return b""
            self._check("the server closed the connection in the middle of its answer")
            await self._moved(seconds)
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def reusable(self) -> bool:
        return self.complete and self._sized and self._keeps and not self.lost

    def close(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self.complete and not self._answered:
            self.close()  # an answer that nobody has asked for
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._failure = f"the server's answer is no HTTP: {error}"
        if self._size > HIGH_WATER and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._answered and not self._sized:
            self.complete = True  # its end is the end of the body
        elif error is not None:
            self._failure = self._failure or f"the connection broke: {error}"
        self._wake()

    # the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < CONTINUES:
            self.headers, self._sized = [], False
        else:
            self._answered = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self._answered:
            self.complete = True
            self._keeps = bool(self._parser.should_keep_alive())  # knows it at this moment only
            self._sized = self._sized or self.status in BODILESS

    def _check(self, words: str) -> None:
        if self._failure is None and not self.lost:
            return
        late = asyncio.get_running_loop().time() - self._sent_at > STALE_SECONDS
        stale = self._calls > 1 and not self._heard and not late
        raise (httpx.RemoteProtocolError if stale else BrokenResponseError)(self._failure or words)

    async def _moved(self, seconds: float | None) -> None:
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
    """Gives its connection back when it is closed after its end; before, the connection is closed with it."""

    def __init__(self, owner: HttpTransport, connection: _Connection, seconds: float | None) -> None:
        self._owner = owner
        self._connection = connection
        self._seconds = seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self._connection.piece(self._seconds):
            yield piece

    async def aclose(self) -> None:
        if not self._connection.reusable():
            await self._owner.aclose()


def _expire(waiter: asyncio.Future[None], seconds: float) -> None:
    if not waiter.done():
        waiter.set_exception(httpx.ReadTimeout(f"nothing came for {seconds:g} s"))


def _head(request: httpx.Request) -> bytes:
    lines = [b"%b: %b\r\n" % (name, value) for name, value in request.headers.raw]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.url.raw_path, b"".join(lines))
