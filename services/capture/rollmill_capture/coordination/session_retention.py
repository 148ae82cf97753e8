"""Housekeeping of the topic ``sessions``: what is long over gets a tombstone, and is forgotten where that is read.

One replica writes the tombstones. A tombstone says which attempt it forgets; one that another replica's opening of a
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
from rollmill_capture.coordination.membership import Membership
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.coordination.sessions_topic import attempt_header
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError

MOST_AT_ONCE = 5000
"""Tombstones of one round."""
AT_ONCE = 100
"""Of them under way together."""
SLICE = 500
"""Entries looked at between two turns of the loop."""


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
        self.admission.tidy(self.clock.now())
        self.metrics.gauge("sessions_known", len(self.table))
        if not self.membership.is_leader:
            return
        try:
            await self._write()
        except NotAcknowledgedError as error:
            structlog.get_logger().info("sessions that are over are forgotten later", error=str(error))

    async def _write(self) -> None:
        for entry in self.table.overtaken():
            await self.event_writer.append_best_effort(SESSIONS, entry.session_id, encode(entry, JSON))
        over = await self._over()
        for start in range(0, len(over), AT_ONCE):
            await asyncio.gather(*map(self._forget, over[start : start + AT_ONCE]))
        for replica in self.membership.expired():
            await self.event_writer.append_best_effort(SESSIONS, replica_key(replica), None)

    async def _forget(self, entry: SessionEntry) -> None:
        await self.event_writer.append_best_effort(SESSIONS, entry.session_id, None, attempt_header(entry.attempt))
        self.metrics.count("sessions_forgotten")

    async def _over(self) -> list[SessionEntry]:
        """A table may be large: others have their turn meanwhile."""
        entries, found, before = self.table.entries(), list[SessionEntry](), self.clock.now() - self.retention
        for start in range(0, len(entries), SLICE):
            found += [entry for entry in entries[start : start + SLICE] if ended_at(entry) < before]
            await asyncio.sleep(0)
        return found[:MOST_AT_ONCE]


def ended_at(entry: SessionEntry) -> float:
    """When the session was over at the latest: its closing, or its deadline, at which the builder closes it."""
    return entry.opened_at + entry.spec.deadline_seconds if entry.closed_at is None else entry.closed_at
