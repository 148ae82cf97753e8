"""Which sessions a replay takes, and their events with other rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.codec import CONTENT_TYPE, MSGPACK, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, Record, SessionClosed, SessionExpired, SessionOpened
from rollmill.ops.replay.plan import Plan
from rollmill.runtime.stream.processor import InputRecord

SessionAttempt = tuple[str, int]
"""Session id and attempt."""


@dataclass
class Selection:
    """Folds `completions`. A session is taken whole or not at all; its first record decides."""

    plan: Plan
    truncated: frozenset[int] = frozenset()
    """Partitions with a deleted beginning: a session that is not opened there began before."""
    taken: set[SessionAttempt] = field(default_factory=set)
    left_out: set[SessionAttempt] = field(default_factory=set)
    _opened: set[SessionAttempt] = field(default_factory=set)

    def take(self, record: InputRecord) -> Iterator[InputRecord]:
        """What the builder reads in place of ``record``."""
        try:
            event: Any = record.read()
        except PoisonRecordError:
            if self.plan.since is None and record.offset >= self.plan.starts_at(record.partition):
                yield record  # becomes a dead letter again
            return
        name = event.session_id, event.attempt
        if self._takes(name, event, record):
            yield from self._respecified(name, event, record) if self.plan.respecifies else (record,)

    def _takes(self, name: SessionAttempt, event: Any, record: InputRecord) -> bool:
        if name not in self.taken and name not in self.left_out:
            (self.taken if self._begins(event, record) else self.left_out).add(name)
        return name in self.taken

    def _begins(self, event: Any, record: InputRecord) -> bool:
        if record.offset < self.plan.starts_at(record.partition):
            return False
        if record.partition in self.truncated and not isinstance(event, SessionOpened):
            return False
        return self.plan.since is None or event_time(event) >= self.plan.since

    def _respecified(self, name: SessionAttempt, event: Any, record: InputRecord) -> Iterator[InputRecord]:
        """A session that was never opened has the defaults, and the new rules all the same."""
        if isinstance(event, SessionOpened):
            self._opened.add(name)
            yield _with(record, self.plan.reopened(event))
            return
        if isinstance(event, SessionClosed | SessionExpired) and name not in self._opened:
            self._opened.add(name)
            yield _with(record, self.plan.reopened(SessionOpened(session_id=name[0], attempt=name[1])))
        yield record


def event_time(event: Any) -> float:
    if isinstance(event, CompletionRecord):
        return event.started_at or event.ended_at
    at: float = event.at
    return at


def _with(record: InputRecord, event: Record) -> InputRecord:
    headers = ((CONTENT_TYPE, MSGPACK.encode()),)
    return replace(record, value=encode(event, MSGPACK), headers=headers, resolved=None)
