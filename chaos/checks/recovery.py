"""How long a client needs to recover: until its own counter of finished work increases."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from chaos.stack import TRAINER, Stack
from chaos.trainer import HANDED_OVER

MAX_SECONDS = 60.0
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
class RecoveryTimer:
    """Reads the counters of one stack's clients."""

    stack: Stack
    http: httpx.AsyncClient

    async def work_done(self, name: str) -> float:
        """Work done so far by the client's process; 0 where it does not answer."""
        if name == TRAINER:
            return float(_lines(self.stack.trainer_directory / HANDED_OVER))
        try:
            response = await self.http.get(self.stack.supervisor.health_url(name) + "/metrics", timeout=2.0)
        except httpx.HTTPError:
            return 0.0
        lines = (line.split() for line in response.text.splitlines() if line.startswith(COUNTERS[name]))
        return sum(float(fields[-1]) for fields in lines)

    async def seconds_to_recover(self, name: str) -> float | None:
        """Seconds until the client has finished more work than at the call; None: not within `MAX_SECONDS`."""
        began, last = time.monotonic(), await self.work_done(name)
        while time.monotonic() - began < MAX_SECONDS:
            now = await self.work_done(name)
            if now > last:
                return time.monotonic() - began
            last = now  # a new process counts from 0
            await asyncio.sleep(POLL_SECONDS)
        return None


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
