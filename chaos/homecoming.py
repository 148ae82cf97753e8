"""After the storm: what the faults held up comes through, before the trainer is told that nothing more comes.

Records wait in capture's spool, sessions wait behind a stage that is only just back, and what the broker refused lies
in ``dead-letters`` until a person drives it again, which is done here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import httpx

from chaos.stack import Stack
from rollmill.ops.dlq import open_manager, read_letters
from rollmill.ops.dlq.dead_letter import LetterState
from rollmill.ops.ledger.log_reader import Log
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.topics import TRAJECTORIES

LONGEST = 120.0
QUIET = 20.0
"""Seconds without another trajectory after which no more are waited for: a mutation may have lost them."""
POLL_SECONDS = 0.5
SPOOLED = "rollmill_spool_records"


async def all_home(stack: Stack, sessions: Collection[str]) -> None:
    """Return once capture's spool is empty and every session is a trajectory, or no more of them come."""
    began = moved = time.monotonic()
    missing = set(sessions)
    async with httpx.AsyncClient() as http:
        while (missing or await _spooled(stack, http)) and time.monotonic() - began < LONGEST:
            await _drive_again(stack)
            left = missing - await _trajectories(stack)
            if left != missing:
                missing, moved = left, time.monotonic()
            if time.monotonic() - moved > QUIET:
                return
            await asyncio.sleep(POLL_SECONDS)


async def _spooled(stack: Stack, http: httpx.AsyncClient) -> float:
    """Records in the spool; infinity where capture does not say."""
    try:
        answer = await http.get(stack.supervisor.health_url("capture") + "/metrics", timeout=2.0)
    except httpx.HTTPError:
        return float("inf")
    values = [float(line.split()[-1]) for line in answer.text.splitlines() if line.startswith(SPOOLED)]
    return sum(values) if values else float("inf")


async def _drive_again(stack: Stack) -> None:
    letters = await read_letters(stack.settings)
    if all(letter.state is not LetterState.OPEN for letter in letters.values()):
        return
    async with open_manager(stack.settings, SystemClock(), "chaos") as desk:
        for place, letter in list(desk.letters.items()):
            if letter.state is LetterState.OPEN:
                stack.chronicle.write(f"letter {place} is driven again: {letter.info.reason}")
                await desk.replay(place, "the fault is over")


async def _trajectories(stack: Stack) -> set[str]:
    async with Log.open(stack.settings) as log:
        return {(record.key or b"").decode() async for record in log.read(TRAJECTORIES)}
