"""The messages of the supervisor: kept in a file with times, and the nemesis can wait for one."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class SupervisorLog:
    """Lines in the order of their arrival."""

    file: Path
    """A copy with times, for debugging."""
    lines: list[str] = field(default_factory=list)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, line: str) -> None:
        self.lines.append(line)
        with self.file.open("a") as copy:
            copy.write(f"{time.time():.2f} {line}\n")
        self._grown.set()
        self._grown = asyncio.Event()

    def __len__(self) -> int:
        return len(self.lines)

    def has_line(self, prefix: str, *, since: int) -> bool:
        """Whether a line from number ``since`` on begins with ``prefix``."""
        return any(line.startswith(prefix) for line in self.lines[since:])

    async def wait_for(self, prefix: str, seconds: float, *, since: int) -> bool:
        """Wait for a line from number ``since`` on that begins with ``prefix``; False where none comes in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has_line(prefix, since=since):
                    await self._grown.wait()
        return self.has_line(prefix, since=since)
