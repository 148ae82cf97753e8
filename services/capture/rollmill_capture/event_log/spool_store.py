"""The spool's file: records in the order they came, in SQLite, synchronous to the disk. Used from one thread.

One process owns a file, by a lock beside it. The next start takes the first file without an owner, so that what a dead
process left is found again; a directory serves the replicas of one machine.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import ConfigurationError

_TABLE = """
CREATE TABLE IF NOT EXISTS spooled (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  topic TEXT NOT NULL,
  key TEXT NOT NULL,
  value BLOB NOT NULL,
  refused TEXT
)
"""
MOST_FILES = 1024


@dataclass(frozen=True)
class SpooledRecord:
    """A record for a topic, by its name without the prefix. ``number`` 0: not in the file yet."""

    topic: str
    key: str
    value: bytes
    number: int = 0


class SpoolStore:
    """Raises sqlite3's errors; ``add`` returns when the records are on the disk."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_TABLE)

    def add(self, records: Iterable[SpooledRecord]) -> None:
        """All of them in one transaction, or none."""
        rows = [(record.topic, record.key, record.value) for record in records]
        self._transaction("INSERT INTO spooled (topic, key, value) VALUES (?, ?, ?)", rows)

    def first(self, size: int) -> list[SpooledRecord]:
        """The oldest records: as many as fit ``size`` bytes, and at least one where there is any."""
        found: list[SpooledRecord] = []
        rows = self._db.execute("SELECT topic, key, value, number FROM spooled WHERE refused IS NULL ORDER BY number")
        for row in rows:
            record = SpooledRecord(*row)
            size -= len(record.value)
            if found and size < 0:
                break
            found.append(record)
        rows.close()
        return found

    def remove(self, numbers: Sequence[int]) -> None:
        self._transaction("DELETE FROM spooled WHERE number = ?", [(number,) for number in numbers])

    def set_aside(self, number: int, reason: str) -> None:
        """Keep a record that the log refuses out of the way of the others."""
        self._transaction("UPDATE spooled SET refused = ? WHERE number = ?", [(reason, number)])

    def shrink(self) -> None:
        """Give the space of removed records back to the disk."""
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()

    def contents(self) -> list[tuple[str, int, int]]:
        """Key, records and bytes of everything that waits to be sent."""
        query = "SELECT key, count(*), sum(length(value)) FROM spooled WHERE refused IS NULL GROUP BY key"
        return list(self._db.execute(query))

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def _transaction(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def open_spool_store(directory: Path, prefix: str) -> SpoolStore:
    """The first file of the prefix that no running process owns. Raises ConfigurationError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_FILES):
            path = directory / f"{prefix}{number}.sqlite"
            lock = _locked(path.with_suffix(".lock"))
            if lock is not None:
                return SpoolStore(path, lock)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"the spool in {directory} cannot be used: {error}; set ROLLMILL_SPOOL_DIR") from error
    raise ConfigurationError(f"all {MOST_FILES} spool files in {directory} are in use")


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None: another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
