"""After the faults: waits until everything that they delayed has come through, so that the trainer can end its stream.

Records may wait in capture's spool, sessions behind a stage that has just restarted; and what the broker refused is in
``dead-letters`` until an operator replays it, which is done here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import httpx

from chaos.stack import Stack
from rollmill.ops.dlq import open_manager, read_letters
from rollmill.ops.dlq.dead_letter import LetterState
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.topics import TRAJECTORIES

MAX_SECONDS = 120.0
QUIET_SECONDS = 20.0
"""Without another trajectory for so long, no more are expected: a mutation may have lost them."""
POLL_SECONDS = 0.5
SPOOLED = "rollmill_spool_records"


async def drain(stack: Stack, sessions: Collection[str]) -> None:
    """Return once capture's spool is empty and every session has a trajectory, or no more of them arrive."""
    began = moved = time.monotonic()
    missing = set(sessions)
    async with httpx.AsyncClient() as http:
        while (missing or await _spooled(stack, http)) and time.monotonic() - began < MAX_SECONDS:
            await _replay_dead_letters(stack)
            left = missing - await _trajectories(stack)
            if left != missing:
                missing, moved = left, time.monotonic()
            if time.monotonic() - moved > QUIET_SECONDS:
                return
            await asyncio.sleep(POLL_SECONDS)


async def _spooled(stack: Stack, http: httpx.AsyncClient) -> float:
    """Records in the spool; infinity where capture does not report it."""
    try:
        response = await http.get(stack.supervisor.health_url("capture") + "/metrics", timeout=2.0)
    except httpx.HTTPError:
        return float("inf")
    values = [float(line.split()[-1]) for line in response.text.splitlines() if line.startswith(SPOOLED)]
    return sum(values) if values else float("inf")


async def _replay_dead_letters(stack: Stack) -> None:
    letters = await read_letters(stack.settings)
    if all(letter.state is not LetterState.OPEN for letter in letters.values()):
        return
    async with open_manager(stack.settings, SystemClock(), "chaos") as manager:
        for position, letter in list(manager.letters.items()):
            if letter.state is LetterState.OPEN:
                stack.supervisor_log.write(f"dead letter {position} is replayed: {letter.info.reason}")
                await manager.replay(position, "the fault is over")


async def _trajectories(stack: Stack) -> set[str]:
    async with Log.open(stack.settings) as log:
        return {(record.key or b"").decode() async for record in log.read(TRAJECTORIES)}
