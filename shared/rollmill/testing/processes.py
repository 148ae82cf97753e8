"""A service as a process of its own, for tests that kill, stop and restart it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 60.0


@dataclass
class ServiceProcess:
    """``log`` grows as the process writes to standard error."""

    process: Process
    log: bytearray = field(default_factory=bytearray)
    _grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    _ended: bool = False

    async def read(self) -> None:
        """Follow the log to its end."""
        if self.process.stderr is not None:
            async for line in self.process.stderr:
                await self._grow(line)
        self._ended = True
        await self._grow(b"")

    async def _grow(self, line: bytes) -> None:
        self.log.extend(line)
        async with self._grown:
            self._grown.notify_all()

    async def says(self, words: bytes, seconds: float = START_SECONDS) -> None:
        """Wait until the log has the words. Raises AssertionError with the log where it ends before."""
        async with asyncio.timeout(seconds), self._grown:
            await self._grown.wait_for(lambda: words in self.log or self._ended)
        if words not in self.log:
            raise AssertionError(f"the process never said {words!r}: {self.log.decode()}")

    async def stopped(self, seconds: float = START_SECONDS) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), seconds)

    async def killed(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def service_process(module: str, environment: Mapping[str, str]) -> AsyncIterator[ServiceProcess]:
    """``python -m module`` with ``environment`` on top of this process's; killed at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, env={**os.environ, **environment}, stderr=PIPE
    )
    running = ServiceProcess(process)
    reading = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        await running.killed()
        await reading


def free_port() -> int:
    """Below the range of outgoing connections, so that nobody who connects to it in vain is given it."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def processes_with(word: str) -> list[int]:
    """Processes of this machine that have ``word`` as one of their arguments."""
    return await asyncio.to_thread(_processes_with, word.encode())


def _processes_with(word: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


async def until_gone(word: str, seconds: float = 5.0) -> None:
    """Wait until no process has ``word`` as an argument: the kernel takes its moment to end a namespace."""
    async with asyncio.timeout(seconds):
        while await processes_with(word):
            continue
