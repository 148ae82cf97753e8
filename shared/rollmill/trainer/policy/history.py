"""One policy in the topic ``policies``: its newest version and where its epochs forked (rules R1, A4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from rollmill.errors import FatalError, PoisonRecordError
from rollmill.models import PolicyAnnouncement, PolicyVersion
from rollmill.models.versions import skips_epochs
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.settings import KafkaSettings
from rollmill.topics import POLICIES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyHistory:
    """Announcements of one policy, in the order of the log."""

    announcements: tuple[PolicyAnnouncement, ...] = ()

    @property
    def newest(self) -> PolicyVersion | None:
        """The last announced; None before the first announcement."""
        return self.announcements[-1].version if self.announcements else None

    @property
    def forks(self) -> dict[int, int]:
        """By epoch the version that it was resumed from."""
        return {item.version.epoch: item.resumed_from for item in self.announcements if item.resumed_from is not None}

    def adding(self, announcement: PolicyAnnouncement) -> PolicyHistory:
        return PolicyHistory((*self.announcements, announcement))


def history_of(policy: str, announcements: Iterable[PolicyAnnouncement]) -> PolicyHistory:
    """Without those that skip epochs: every reader ignores them (rule R1)."""
    history = PolicyHistory()
    for item in announcements:
        if item.policy == policy and not skips_epochs(item.version, history.newest):
            history = history.adding(item)
        elif item.policy == policy:
            log.warning("the announcement of %s after %s skips epochs and is ignored", item.version, history.newest)
    return history


async def read_history(
    clients: KafkaClients, settings: KafkaSettings, policy: str, deadline_seconds: float
) -> PolicyHistory:
    """Everything that is announced now. Raises FatalError where the topic cannot be read in time."""
    found: list[PolicyAnnouncement | None] = []
    stop = asyncio.Event()
    reader = GlobalTable(clients, settings, POLICIES, lambda _, item: found.append(item), _ignore)
    reading = asyncio.create_task(reader.run(stop))
    caught_up = asyncio.create_task(reader.caught_up())
    try:
        done, _ = await asyncio.wait(
            (reading, caught_up), timeout=deadline_seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        stop.set()
        caught_up.cancel()
        await asyncio.wait((reading,), timeout=deadline_seconds)
    if reading in done or not done:
        why = reading.exception() if reading.done() else f"no answer in {deadline_seconds:g} s"
        raise FatalError(f"the topic {POLICIES.full_name(settings.prefix)} cannot be read: {why}")
    return history_of(policy, (item for item in found if item is not None))


def _ignore(key: str, error: PoisonRecordError) -> None:
    """An unreadable record announces nothing."""
    log.warning("a record of the topic policies cannot be read and is skipped: key %r, %s", key, error)
