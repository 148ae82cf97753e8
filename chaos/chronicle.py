"""What the supervisor says, to be waited for, and in a file with times."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Chronicle:
    """Lines in the order in which they came."""

    file: Path
    """Kept for whoever looks for a cause."""
    lines: list[str] = field(default_factory=list)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, line: str) -> None:
        self.lines.append(line)
        with self.file.open("a") as book:
            book.write(f"{time.time():.2f} {line}\n")
        self._grown.set()
        self._grown = asyncio.Event()

    def __len__(self) -> int:
        return len(self.lines)

    def since(self, place: int, words: str) -> bool:
        """Whether a line from ``place`` on begins with the words."""
        return any(line.startswith(words) for line in self.lines[place:])

    async def says(self, words: str, seconds: float, *, since: int) -> bool:
        """Wait for a line from ``since`` on that begins with ``words``; False where none comes in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.since(since, words):
                    await self._grown.wait()
        return self.since(since, words)
