"""An HTTP server with prepared responses on a real socket: in place of a model server; bytes are sent unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

_GONE = (asyncio.IncompleteReadError, ConnectionError)


@dataclass(frozen=True)
class CannedRequest:
    """One request as it was received."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    raw: bytes

    @property
    def body(self) -> Any:
        """The body as JSON; None where there is none."""
        return orjson.loads(self.raw) if self.raw else None


@dataclass(frozen=True)
class CannedResponse:
    """One response. Its pieces are written one by one; with ``cut`` the connection is closed before the body's end."""

    pieces: tuple[bytes, ...]
    status: int = 200
    content_type: str = "application/json"
    cut: bool = False

    @classmethod
    def json(cls, body: object, status: int = 200) -> CannedResponse:
        return cls((orjson.dumps(body),), status)

    @classmethod
    def events(cls, raw: bytes, size: int = 1 << 20) -> CannedResponse:
        """A stream of server-sent events in pieces of ``size`` bytes."""
        pieces = tuple(raw[start : start + size] for start in range(0, len(raw), size))
        return cls(pieces, content_type="text/event-stream")


@dataclass
class CannedServer:
    """Sends what ``respond`` returns for each request, and keeps the requests."""

    respond: Callable[[CannedRequest], CannedResponse]
    url: str = ""
    requests: list[CannedRequest] = field(default_factory=list)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(*_GONE):
                while not (await self._exchange(reader, writer)).cut:
                    pass
        finally:
            writer.close()
        with suppress(*_GONE):
            await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> CannedResponse:
        request = await _read_request(reader)
        self.requests.append(request)
        response = self.respond(request)
        head = f"HTTP/1.1 {response.status} Canned\r\ncontent-type: {response.content_type}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for piece in response.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"" if response.cut else b"0\r\n\r\n")
        await writer.drain()
        return response


async def _read_request(reader: asyncio.StreamReader) -> CannedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    pairs = [line.split(":", 1) for line in head[1:] if line]
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    return CannedRequest(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


@asynccontextmanager
async def canned_server(
    respond: Callable[[CannedRequest], CannedResponse], port: int = 0
) -> AsyncIterator[CannedServer]:
    """A server on loopback; its ``url`` has no path. ``port`` 0: a free one."""
    canned = CannedServer(respond)
    server = await asyncio.start_server(canned.accept, "127.0.0.1", port)
    canned.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield canned
    finally:
        server.close()
        await canned.close()
        await server.wait_closed()
