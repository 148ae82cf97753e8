"""The replicas of a prefix: who lives, whose turn housekeeping is, and which of them are done with a pause.

Each writes a sign of life to the topic ``sessions``. The living one with the smallest id keeps the house: nobody
configures it, a restart or a crash passes it on, and where two believe it for a moment they write the same.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollmill.codec import JSON, encode
from rollmill.models import PolicyPause, ReplicaHeartbeat
from rollmill.runtime.telemetry.clock import Clock
from rollmill.topics import SESSIONS
from rollmill_capture.coordination.policy_pauses import PolicyPauses
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError

BEAT_SECONDS = 5.0
ALIVE_SECONDS = 3 * BEAT_SECONDS
"""Without a sign of life for this long a replica is taken for dead."""
BURIAL_SECONDS = 3600.0
"""After this the last sign of life of a dead replica leaves the topic."""


@dataclass(frozen=True)
class Replicas:
    """The last sign of life of each."""

    known: dict[str, ReplicaHeartbeat] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is news; cleared by who waits for it."""

    def apply(self, entry: ReplicaHeartbeat) -> None:
        self.known[entry.replica] = entry
        self.moved.set()

    def forget(self, replica: str) -> None:
        self.known.pop(replica, None)
        self.moved.set()


@dataclass(frozen=True)
class Membership:
    """As one of its replicas, ``replica``, sees it."""

    gates: PolicyPauses
    sink: EventWriter
    clock: Clock
    replicas: Replicas = field(default_factory=Replicas)
    replica: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def keeps_house(self) -> bool:
        """Whether this replica is the one that tidies up."""
        return all(self.replica < entry.replica for entry in self._others())

    def dead(self) -> list[str]:
        """Replicas that are silent for so long that nobody needs to know of them."""
        long_ago = self.clock.now() - BURIAL_SECONDS
        return [name for name, entry in self.replicas.known.items() if entry.at < long_ago and name != self.replica]

    def awaited(self, gate: PolicyPause) -> int:
        """Living replicas that are not done with a gate, without this one."""
        return sum(entry.reached.get(gate.policy, 0) < gate.number for entry in self._others())

    async def reached(self, gate: PolicyPause, seconds: float) -> bool:
        """Wait until all replicas are done with a gate; False: ``seconds`` were over before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._reached(gate)
        return gate.policy not in self.gates.unreached() and not self.awaited(gate)

    async def _reached(self, gate: PolicyPause) -> None:
        while gate.policy in self.gates.unreached() or self.awaited(gate):
            self.replicas.moved.clear()
            idle = (
                (self.gates.pauses.wait_until_idle(gate.policy, 1.0),) if gate.policy in self.gates.unreached() else ()
            )
            await _first(self.replicas.moved.wait(), *idle, seconds=1.0)  # one may die meanwhile, which nobody tells

    async def beat(self) -> None:
        """Give signs of life, for ever: regularly, and whenever a gate is reached."""
        while True:
            await self.tell()
            await self._rest()

    async def leave(self) -> None:
        """Say that this replica is gone."""
        with suppress(NotAcknowledgedError):
            await self.sink.tell(SESSIONS, ReplicaHeartbeat(replica=self.replica, at=0.0).key, None)

    async def tell(self) -> None:
        """Give one sign of life, where the log takes it."""
        entry = ReplicaHeartbeat(replica=self.replica, at=self.clock.now(), reached=self.gates.reached())
        with suppress(NotAcknowledgedError):
            await self.sink.tell(SESSIONS, entry.key, encode(entry, JSON))

    async def _rest(self) -> None:
        """Until the next sign of life is due: earlier where there is news."""
        idle = [self.gates.pauses.wait_until_idle(policy, BEAT_SECONDS) for policy in self.gates.unreached()]
        await _first(self.gates.changed.wait(), *idle, seconds=BEAT_SECONDS)
        self.gates.changed.clear()

    def _others(self) -> list[ReplicaHeartbeat]:
        alive = self.clock.now() - ALIVE_SECONDS
        return [entry for name, entry in self.replicas.known.items() if name != self.replica and entry.at >= alive]


async def _first(*waits: Coroutine[Any, Any, object], seconds: float) -> None:
    """Until the first of them is over, or ``seconds`` are."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
