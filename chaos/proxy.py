"""The network between one client and the broker: a TCP proxy that can cut, delay and swallow (rule C6)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

HOST = "127.0.0.1"
CHUNK = 1 << 16


@dataclass
class Proxy:
    """Listens at ``port`` and passes everything on to ``target``. Use as ``async with``."""

    port: int
    target: int
    _is_cut: bool = False
    _delay: float = 0.0
    _flows: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _passing: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._flows.set()
        self._server = await asyncio.start_server(self._accepted, HOST, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self._abort()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def cut(self) -> None:
        """Every connection breaks, and none is made."""
        self._is_cut = True
        self._abort()

    def delay(self, seconds: float) -> None:
        """Whatever passes takes longer by this, each way."""
        self._delay = seconds

    def swallow(self) -> None:
        """Connections stay, and nothing passes: as where a firewall forgets them."""
        self._flows.clear()

    def mend(self) -> None:
        self._is_cut, self._delay = False, 0.0
        if not self._flows.is_set():
            self._abort()  # what was swallowed is gone
        self._flows.set()

    def _abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there, away = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, away}
        self._writers |= both
        try:
            await asyncio.gather(self._pass(reader, away), self._pass(there, writer))
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(CHUNK):
                await self._flows.wait()
                if self._delay:
                    await asyncio.sleep(self._delay)
                sink.write(chunk)
                await sink.drain()
        # One side has ended: the other one is told at once.
        sink.transport.abort()
