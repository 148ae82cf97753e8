"""Housekeeping of the topic ``sessions``: what is long over gets a tombstone, and is forgotten where that is read.

The leader writes the tombstones. A tombstone names the attempt that it forgets; one that another replica's opening of a
later attempt has overtaken is passed over by every reader, and the entry is written again, because compaction keeps
the last record alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from rollmill.codec import JSON, encode
from rollmill.models import SessionEntry, replica_key
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import SESSIONS
from rollmill_capture.admission import Admission
from rollmill_capture.coordination.closed_session import ClosedSession
from rollmill_capture.coordination.membership import Membership
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.coordination.sessions_topic import attempt_header
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError

MOST_PER_ROUND = 5000
"""Tombstones of one round."""
CONCURRENT_WRITES = 100
ENTRIES_PER_TURN = 500
"""Entries checked before other tasks of the event loop have their turn."""


@dataclass(frozen=True)
class SessionRetention:
    """``retention``: seconds for which a session that is over stays known."""

    table: SessionTable
    membership: Membership
    admission: Admission
    event_writer: EventWriter
    clock: Clock
    metrics: Metrics
    retention: float

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self.retention / 10))
            await self.sweep()

    async def sweep(self) -> None:
        """One round; what cannot be written now waits for the next."""
        self.admission.forget_ended(self.clock.now())
        self.metrics.gauge("sessions_known", len(self.table))
        if not self.membership.is_leader:
            return
        try:
            await self._write()
        except NotAcknowledgedError as error:
            structlog.get_logger().info(
                "ended sessions are not forgotten now: the next round tries again", error=str(error)
            )

    async def _write(self) -> None:
        for entry in self.table.overtaken():
            await self.event_writer.append_best_effort(SESSIONS, entry.session_id, encode(entry, JSON))
        ended = await self._ended()
        for start in range(0, len(ended), CONCURRENT_WRITES):
            await asyncio.gather(*map(self._forget, ended[start : start + CONCURRENT_WRITES]))
        for replica in self.membership.expired():
            await self.event_writer.append_best_effort(SESSIONS, replica_key(replica), None)

    async def _forget(self, entry: SessionEntry | ClosedSession) -> None:
        await self.event_writer.append_best_effort(SESSIONS, entry.session_id, None, attempt_header(entry.attempt))
        self.metrics.count("sessions_forgotten")

    async def _ended(self) -> list[SessionEntry | ClosedSession]:
        """A table may be large: others have their turn meanwhile."""
        entries, found = self.table.sessions(), list[SessionEntry | ClosedSession]()
        before = self.clock.now() - self.retention
        for start in range(0, len(entries), ENTRIES_PER_TURN):
            found += [entry for entry in entries[start : start + ENTRIES_PER_TURN] if ended_at(entry) < before]
            await asyncio.sleep(0)
        return found[:MOST_PER_ROUND]


def ended_at(entry: SessionEntry | ClosedSession) -> float:
    """When the session was over at the latest: its closing, or its deadline, at which the builder closes it."""
    if entry.closed_at is not None:
        return entry.closed_at
    deadline = entry.deadline_seconds if isinstance(entry, ClosedSession) else entry.spec.deadline_seconds
    return entry.opened_at + deadline
