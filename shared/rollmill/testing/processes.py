"""A service as a separate process, for tests that kill, stop and restart it."""

from __future__ import annotations

import asyncio
import os
import signal
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

    async def wait_for_log(self, text: bytes, seconds: float = START_SECONDS) -> None:
        """Wait until the log contains ``text``. Raises AssertionError with the log where the process ends before."""
        async with asyncio.timeout(seconds), self._grown:
            await self._grown.wait_for(lambda: text in self.log or self._ended)
        if text not in self.log:
            raise AssertionError(f"the process never logged {text!r}: {self.log.decode()}")

    async def stop(self, seconds: float = START_SECONDS) -> int:
        """Send SIGTERM and wait; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), seconds)

    async def kill(self) -> None:
        """Send SIGKILL and wait."""
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
        await running.kill()
        await reading


async def processes_with(argument: str) -> list[int]:
    """The ids of processes of this machine that have ``argument`` among their arguments."""
    return await asyncio.to_thread(_processes_with, argument.encode())


def _processes_with(argument: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if argument in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


async def until_gone(argument: str, seconds: float = 5.0) -> None:
    """Wait until no process has ``argument`` among its arguments: the kernel takes some time to end a namespace."""
    async with asyncio.timeout(seconds):
        while await processes_with(argument):
            continue
