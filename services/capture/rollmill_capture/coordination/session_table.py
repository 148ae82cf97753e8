"""The sessions as this replica knows them: the compacted topic ``sessions`` read into memory, and calls in flight.

What this replica writes itself it knows at once; what other replicas write arrives through the topic. An unknown id
is looked for until everything written before the question is read (rule S3).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from rollmill.models import SessionEntry, SessionState
from rollmill_capture.coordination.closed_session import ClosedSession
from rollmill_capture.coordination.tenants import Tenant, TenantUsage


class Position(Protocol):
    """How far a table has been read; `rollmill.runtime.kafka.global_table.GlobalTable` is one."""

    async def end_offsets(self) -> dict[int, int]: ...

    async def reached(self, ends: Mapping[int, int]) -> None: ...


class SessionTable:
    """Session id to its newest entry. Of a closed session only `ClosedSession` is kept: its spec is a short one."""

    def __init__(self) -> None:
        self.on_change: Callable[[SessionEntry], None] | None = None
        """Called with every entry that is news."""
        self._entries: dict[str, SessionEntry | ClosedSession] = {}
        self._by_token: dict[str, str] = {}
        self._overtaken: set[str] = set()
        self._groups: dict[str, Counter[Tenant]] = {}
        """Group id as it is recorded to its tenants, each with its number of sessions; of sessions with a tenant."""
        self._usage: TenantUsage | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, entry: SessionEntry) -> None:
        """Take in a record. An older one (an echo of what was written before) changes nothing."""
        self._overtaken.discard(entry.session_id)
        known = self.get(entry.session_id)
        if known is not None and _rank(entry) < _rank(known):
            return
        if known is not None:
            self._remove(known)
        self._add(entry)

    def forget(self, session_id: str, attempt: int | None) -> None:
        """Take in a tombstone. One that was written for an earlier ``attempt`` changes nothing here."""
        known = self.get(session_id)
        if known is None:
            return
        if attempt is not None and attempt < known.attempt:
            self._overtaken.add(session_id)
        else:
            self._remove(known)

    def entries(self) -> list[SessionEntry]:
        return [_full(item) for item in self._entries.values()]

    def sessions(self) -> list[SessionEntry | ClosedSession]:
        """All sessions as they are kept: quicker than `entries` where few of their fields are needed."""
        return list(self._entries.values())

    def overtaken(self) -> list[SessionEntry]:
        """Entries that are followed in the topic by a tombstone of an earlier attempt: compaction would lose them."""
        return [_full(self._entries[session_id]) for session_id in self._overtaken]

    def _add(self, entry: SessionEntry) -> None:
        entry, kept = _kept(entry)
        self._entries[entry.session_id] = kept
        if entry.token is not None:
            self._by_token[entry.token] = entry.session_id
        if entry.tenant is not None and entry.spec.group_id is not None:
            self._groups.setdefault(entry.spec.group_id, Counter())[entry.tenant] += 1
        if self._usage is not None:
            self._usage.add(entry)
        if self.on_change is not None:
            self.on_change(entry)

    def _remove(self, entry: SessionEntry) -> None:
        del self._entries[entry.session_id]
        self._overtaken.discard(entry.session_id)
        if entry.token is not None:
            self._by_token.pop(entry.token, None)
        if entry.tenant is not None and entry.spec.group_id is not None:
            self._leave_group(entry.spec.group_id, entry.tenant)
        if self._usage is not None:
            self._usage.remove(entry)

    def _leave_group(self, group_id: str, tenant: str) -> None:
        tenants = self._groups[group_id]
        tenants[tenant] -= 1
        self._groups[group_id] = +tenants
        if not self._groups[group_id]:
            del self._groups[group_id]

    def measure(self) -> TenantUsage:
        """What each tenant has, kept up from now on: it takes time for each entry, so only where there are quotas."""
        if self._usage is None:
            self._usage = TenantUsage()
            for entry in self.entries():
                self._usage.add(entry)
        return self._usage

    def owners(self, session_id: str) -> tuple[Tenant, ...]:
        """The tenant that a session is recorded for; empty: it is unknown."""
        entry = self._entries.get(session_id)
        return () if entry is None else (entry.tenant,)

    def group_owners(self, group_id: str) -> tuple[Tenant, ...]:
        """The tenants with sessions in a group, by its recorded id: several only where release 0.1.0 opened them."""
        return tuple(self._groups.get(group_id, ()))

    def get(self, session_id: str) -> SessionEntry | None:
        found = self._entries.get(session_id)
        return None if found is None else _full(found)

    def of_token(self, digest: str) -> SessionEntry | None:
        """The session with the token of this digest."""
        session_id = self._by_token.get(digest)
        return None if session_id is None else self.get(session_id)

    async def catch_up(self, position: Position, seconds: float) -> None:
        """Read what is written by now, or give up after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await position.reached(await position.end_offsets())

    async def find(self, session_id: str, position: Position, seconds: float) -> SessionEntry | None:
        """The entry; an unknown one is waited for until all that is written by now is read, or ``seconds`` are over."""
        if session_id not in self._entries:
            await self.catch_up(position, seconds)
        return self.get(session_id)


def _kept(entry: SessionEntry) -> tuple[SessionEntry, SessionEntry | ClosedSession]:
    """An entry without what is not needed any more, and the form that it is kept in."""
    if entry.state is not SessionState.CLOSED:
        return entry, entry
    kept = ClosedSession.of(entry)
    return kept.entry(), kept


def _full(kept: SessionEntry | ClosedSession) -> SessionEntry:
    return kept.entry() if isinstance(kept, ClosedSession) else kept


def _rank(entry: SessionEntry) -> tuple[int, bool]:
    """Later attempts win, and closed wins over open."""
    return entry.attempt, entry.state is SessionState.CLOSED


class InFlight:
    """Counts the calls of each session that run on this replica; closing a session waits for them."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._closing: set[str] = set()
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self.total = 0

    @contextmanager
    def call(self, session_id: str) -> Iterator[None]:
        """Inside, one call more is in flight."""
        self._calls[session_id] = self._calls.get(session_id, 0) + 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
            self._end_call(session_id)

    def _end_call(self, session_id: str) -> None:
        left = self._calls.pop(session_id) - 1
        if left:
            self._calls[session_id] = left
            return
        for event in self._waiting.pop(session_id, ()):
            event.set()

    async def wait_until_idle(self, session_id: str) -> None:
        """Wait until no call of the session is in flight."""
        if session_id in self._calls:
            event = asyncio.Event()
            self._waiting.setdefault(session_id, []).append(event)
            await event.wait()

    def is_closing(self, session_id: str) -> bool:
        return session_id in self._closing

    @contextmanager
    def closing(self, session_id: str) -> Iterator[None]:
        """Inside, the session takes no new calls."""
        self._closing.add(session_id)
        try:
            yield
        finally:
            self._closing.discard(session_id)
