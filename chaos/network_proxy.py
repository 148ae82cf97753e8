"""The network between one client and the broker: a TCP proxy that can cut, delay and swallow data (rule C6)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

HOST = "127.0.0.1"
CHUNK = 1 << 16


@dataclass
class NetworkProxy:
    """Listens at ``port`` and forwards all bytes to ``target``. Use as ``async with``."""

    port: int
    target: int
    _is_cut: bool = False
    _delay: float = 0.0
    _flows: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._flows.set()
        self._server = await asyncio.start_server(self._accept, HOST, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self._abort()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def cut(self) -> None:
        """Abort every connection, and refuse new ones."""
        self._is_cut = True
        self._abort()

    def delay(self, seconds: float) -> None:
        """Delay all data by this, each way."""
        self._delay = seconds

    def swallow(self) -> None:
        """Keep connections open and forward nothing, as a firewall that has forgotten them."""
        self._flows.clear()

    def mend(self) -> None:
        self._is_cut, self._delay = False, 0.0
        if not self._flows.is_set():
            self._abort()  # swallowed data cannot be delivered
        self._flows.set()

    def _abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, target_writer}
        self._writers |= writers
        try:
            await asyncio.gather(self._forward(reader, target_writer), self._forward(target_reader, writer))
        finally:
            self._writers -= writers
            for each in writers:
                each.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(CHUNK):
                await self._flows.wait()
                if self._delay:
                    await asyncio.sleep(self._delay)
                sink.write(chunk)
                await sink.drain()
        # One side has closed: close the other at once.
        sink.transport.abort()
