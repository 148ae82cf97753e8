"""An HTTP server that plays prepared answers on a real socket: a stand-in for a model server, bytes as given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

_GONE = (asyncio.IncompleteReadError, ConnectionError)


@dataclass(frozen=True)
class Asked:
    """One request as the server got it."""

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
class Played:
    """One answer. Its pieces are written one by one; with ``cut`` the connection is closed before the body's end."""

    pieces: tuple[bytes, ...]
    status: int = 200
    content_type: str = "application/json"
    cut: bool = False

    @classmethod
    def json(cls, body: object, status: int = 200) -> Played:
        return cls((orjson.dumps(body),), status)

    @classmethod
    def events(cls, raw: bytes, size: int = 1 << 20) -> Played:
        """A stream of server-sent events in pieces of ``size`` bytes."""
        pieces = tuple(raw[start : start + size] for start in range(0, len(raw), size))
        return cls(pieces, content_type="text/event-stream")


@dataclass
class CannedServer:
    """Answers what ``answer`` says, and remembers what it was asked."""

    answer: Callable[[Asked], Played]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
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

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Played:
        asked = await _read(reader)
        self.asked.append(asked)
        played = self.answer(asked)
        head = f"HTTP/1.1 {played.status} Played\r\ncontent-type: {played.content_type}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for piece in played.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"" if played.cut else b"0\r\n\r\n")
        await writer.drain()
        return played


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    pairs = [line.split(":", 1) for line in head[1:] if line]
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    return Asked(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


@asynccontextmanager
async def canned_server(answer: Callable[[Asked], Played]) -> AsyncIterator[CannedServer]:
    """A server on a free port of the loopback; its ``url`` has no path."""
    playing = CannedServer(answer)
    server = await asyncio.start_server(playing.accept, "127.0.0.1", 0)
    playing.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield playing
    finally:
        server.close()
        await playing.close()
        await server.wait_closed()
