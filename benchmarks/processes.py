"""The processes that a benchmark starts and measures."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Running:
    pid: int
    port: int

    @property
    def cpu_seconds(self) -> float:
        """Of the process and the threads and children that it has waited for."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / TICKS

    @property
    def total_cpu_seconds(self) -> float:
        """With its living children: a proxy may serve from a worker process."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return self.cpu_seconds + sum(Running(int(child), 0).total_cpu_seconds for child in children)


@asynccontextmanager
async def stopped(process: Process) -> AsyncIterator[None]:
    """Leaving the block ends the process."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def replay_engine() -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.replay", stdout=PIPE)
    async with stopped(process):
        if process.stdout is None:
            raise RuntimeError("the replaying engine has no output")
        yield Running(process.pid, int(await process.stdout.readline()))


async def answers(port: int, path: str, seconds: float) -> bool:
    """Wait until something answers with 200 at the path; False: nothing does in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while await _status(port, path) != "200":  # noqa: ASYNC110  # another process has no event to wait for
                await asyncio.sleep(0.2)
            return True
    return False


async def _status(port: int, path: str) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n".encode())
        line = await reader.readline()
        writer.close()
    except OSError:
        return ""
    words = line.decode("latin-1").split()
    return words[1] if len(words) > 1 else ""
