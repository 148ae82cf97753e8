"""When a client is back at work: its own counter of finished work goes up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from chaos.stack import TRAINER, Stack
from chaos.trainer import SEEN

LONGEST = 60.0
POLL_SECONDS = 0.1
COUNTERS = {
    "capture": "rollmill_calls_total",
    "builder-0": "rollmill_records_total",
    "builder-1": "rollmill_records_total",
    "evaluator": "rollmill_evaluator_records_total",
    "reward-merger": "rollmill_records_total",
    "batcher": "rollmill_records_total",
}


@dataclass(frozen=True)
class Progress:
    """Reads the counters of one stack."""

    stack: Stack
    http: httpx.AsyncClient

    async def of(self, name: str) -> float:
        """Work done so far by this process; 0 where it does not answer."""
        if name == TRAINER:
            return float(_lines(self.stack.trainer_directory / SEEN))
        try:
            answer = await self.http.get(self.stack.supervisor.health_url(name) + "/metrics", timeout=2.0)
        except httpx.HTTPError:
            return 0.0
        lines = (line.split() for line in answer.text.splitlines() if line.startswith(COUNTERS[name]))
        return sum(float(words[-1]) for words in lines)

    async def recovered(self, name: str) -> float | None:
        """Seconds from now until there is work done that was not done now; None: not within `LONGEST`."""
        began, last = time.monotonic(), await self.of(name)
        while time.monotonic() - began < LONGEST:
            now = await self.of(name)
            if now > last:
                return time.monotonic() - began
            last = now  # a new process counts from 0
            await asyncio.sleep(POLL_SECONDS)
        return None


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
