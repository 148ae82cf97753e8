"""One partition: records and transaction markers at offsets, what a committed read sees of them, compaction."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollmill.codec import Headers


class TransactionStatus(StrEnum):
    """Of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False)
class MemoryTransaction:
    """Shared by the records of one transaction."""

    status: TransactionStatus = TransactionStatus.OPEN


@dataclass(frozen=True)
class LogEntry:
    """``transaction`` None: written outside of any. ``marker``: ends a transaction; no reader receives it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    transaction: MemoryTransaction | None = None
    marker: bool = False

    @property
    def status(self) -> TransactionStatus:
        return TransactionStatus.COMMITTED if self.transaction is None else self.transaction.status


class PartitionLog:
    """``start`` is its first offset, ``end`` the next one to be written."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._open: dict[MemoryTransaction, int] = {}
        self.start = self.end = 0

    def append(
        self, key: bytes | None, value: bytes | None, headers: Headers, transaction: MemoryTransaction | None
    ) -> int:
        """The offset that the record got."""
        if transaction is not None:
            self._open.setdefault(transaction, self.end)
        return self._add(LogEntry(self.end, key, value, headers, transaction))

    def finish(self, transaction: MemoryTransaction) -> None:
        """Append the marker of a transaction that was committed or aborted."""
        del self._open[transaction]
        self._add(LogEntry(self.end, None, None, (), transaction, marker=True))

    def last_stable(self) -> int:
        """Where a committed read ends: the first record of an open transaction."""
        return min(self._open.values(), default=self.end)

    def read(self, position: int, limit: int | None) -> tuple[list[LogEntry], int]:
        """At most ``limit`` committed records from ``position`` on, and the position after them.

        A read that reaches its limit stops right after its last record; any other also passes the markers that follow.
        """
        found: list[LogEntry] = []
        for entry in self._from(position):
            if entry.marker or entry.status is not TransactionStatus.COMMITTED:
                continue
            if len(found) == limit:
                break
            found.append(entry)
        full = limit is not None and len(found) == limit and limit > 0
        return found, found[-1].offset + 1 if full else max(position, self.last_stable())

    def committed(self) -> Sequence[LogEntry]:
        """All entries that a committed read from the start returns."""
        return self.read(self.start, None)[0]

    def compact(self) -> None:
        """Keep the newest committed record of each key below the last stable offset, and no old tombstone."""
        stable = self.last_stable()
        newest = {entry.key: entry.offset for entry in self.committed()}
        self._entries = [
            entry
            for entry in self._entries
            if entry.offset >= stable or (newest.get(entry.key) == entry.offset and entry.value is not None)
        ]

    def _from(self, position: int) -> Sequence[LogEntry]:
        first = bisect_left(self._entries, position, key=lambda entry: entry.offset)
        last = bisect_left(self._entries, self.last_stable(), key=lambda entry: entry.offset)
        return self._entries[first:last]

    def _add(self, entry: LogEntry) -> int:
        self._entries.append(entry)
        self.end += 1
        return entry.offset
