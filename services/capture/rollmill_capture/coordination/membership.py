"""The replicas of a prefix: which are alive, which is the leader, and which of them are done with a pause.

Each writes heartbeats to the topic ``sessions``. The living one with the smallest id is the leader, which does the
housekeeping: it is not configured, a restart or a crash passes it on, and where two replicas take themselves for the
leader for a moment they write the same.
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
from rollmill.models.session import ALIVE_SECONDS, HEARTBEAT_SECONDS
from rollmill.runtime.telemetry.clock import Clock
from rollmill.topics import SESSIONS
from rollmill_capture.coordination.policies import PolicyPauses
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError

EXPIRY_SECONDS = 3600.0
"""After this the last heartbeat of a dead replica is removed from the topic."""


@dataclass(frozen=True)
class Replicas:
    """The last heartbeat of each."""

    known: dict[str, ReplicaHeartbeat] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is news; cleared by the task that waits for it."""

    def apply(self, entry: ReplicaHeartbeat) -> None:
        self.known[entry.replica] = entry
        self.changed.set()

    def forget(self, replica: str) -> None:
        self.known.pop(replica, None)
        self.changed.set()


@dataclass(frozen=True)
class Membership:
    """As one of its replicas, ``replica``, sees it."""

    pauses: PolicyPauses
    event_writer: EventWriter
    clock: Clock
    replicas: Replicas = field(default_factory=Replicas)
    replica: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_leader(self) -> bool:
        """Whether this replica does the housekeeping."""
        return all(self.replica < entry.replica for entry in self._others())

    def expired(self) -> list[str]:
        """Replicas that have been silent for so long that their heartbeats can be removed."""
        long_ago = self.clock.now() - EXPIRY_SECONDS
        return [name for name, entry in self.replicas.known.items() if entry.at < long_ago and name != self.replica]

    def awaited(self, pause: PolicyPause) -> int:
        """Living replicas that are not done with a pause, without this one."""
        return sum(entry.reached.get(pause.policy, 0) < pause.number for entry in self._others())

    async def wait_reached(self, pause: PolicyPause, seconds: float) -> bool:
        """Wait until all replicas are done with a pause; False: ``seconds`` were over before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_reached(pause)
        return pause.policy not in self.pauses.unreached() and not self.awaited(pause)

    async def _wait_reached(self, pause: PolicyPause) -> None:
        while pause.policy in self.pauses.unreached() or self.awaited(pause):
            self.replicas.changed.clear()
            idle = (
                (self.pauses.local.wait_until_idle(pause.policy, 1.0),)
                if pause.policy in self.pauses.unreached()
                else ()
            )
            await _first(
                self.replicas.changed.wait(), *idle, seconds=1.0
            )  # a replica may die meanwhile, which sends no news

    async def send_heartbeats(self) -> None:
        """Write heartbeats, for ever: regularly, and whenever this replica is done with a pause."""
        while True:
            await self.send_heartbeat()
            await self._wait_due()

    async def leave(self) -> None:
        """Remove this replica's heartbeat: it stops now."""
        with suppress(NotAcknowledgedError):
            await self.event_writer.append_best_effort(
                SESSIONS, ReplicaHeartbeat(replica=self.replica, at=0.0).key, None
            )

    async def send_heartbeat(self) -> None:
        """Write one heartbeat, where Kafka takes it."""
        entry = ReplicaHeartbeat(replica=self.replica, at=self.clock.now(), reached=self.pauses.reached())
        with suppress(NotAcknowledgedError):
            await self.event_writer.append_best_effort(SESSIONS, entry.key, encode(entry, JSON))

    async def _wait_due(self) -> None:
        """Until the next heartbeat is due: earlier where there is news."""
        idle = [self.pauses.local.wait_until_idle(policy, HEARTBEAT_SECONDS) for policy in self.pauses.unreached()]
        await _first(self.pauses.changed.wait(), *idle, seconds=HEARTBEAT_SECONDS)
        self.pauses.changed.clear()

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
