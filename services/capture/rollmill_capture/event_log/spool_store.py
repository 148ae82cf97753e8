"""The spool's file: records in the order they came, in SQLite, synchronous to the disk. Used from one thread.

Each row has a digest: what the disk altered is set aside, never sent. Release 0.1.0 reads and writes the same file; its
rows have none, and are sent as they are. The journal is a rollback journal: what is acknowledged is in the file itself,
where the digests are, and not in a write-ahead log, of which SQLite drops what follows a damaged page without a trace.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollmill_capture.event_log.spooled_record import SpooledRecord

TABLE = """
CREATE TABLE IF NOT EXISTS spooled (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  topic TEXT NOT NULL,
  key TEXT NOT NULL,
  value BLOB NOT NULL,
  refused TEXT,
  digest BLOB
)
"""
COLUMNS = ("number", "topic", "key", "value", "refused", "digest")
DAMAGED = "damaged: "
"""How the reason of a row begins that was altered on the disk; others are refused by Kafka."""
_INTO = "INTO spooled (number, topic, key, value, refused, digest) VALUES (?, ?, ?, ?, ?, ?) RETURNING number"
_REMOVE = "DELETE FROM spooled WHERE number = ? RETURNING CAST(key AS TEXT), length(value)"
_SET_ASIDE = "UPDATE spooled SET refused = ? WHERE number = ? RETURNING number"
_DAMAGE = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))
_DISK = frozenset(
    (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
    )
)
"""Errors that say nothing about what the file holds."""

Row = tuple[int, str, str, bytes, str | None, bytes | None]


class DamagedSpoolError(sqlite3.DatabaseError):
    """The file is not the database that was written: rows of it may be missing or altered."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is damaged, in contrast to a disk that is full or fails."""
    return isinstance(error, DamagedSpoolError) or _code(error) in _DAMAGE


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


class SpoolStore:
    """Raises sqlite3's errors; ``add`` returns when the records are on the disk. ``lock``: closed with it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.lock = path, lock
        self.saved = 0
        """Records that this file has from a damaged one."""
        if not path.exists():
            _create(path)
        self._db = _connect(path)
        try:
            self._last = self._prepare()
        except sqlite3.DatabaseError as error:
            self._db.close()
            if is_damage(error) or _code(error) in _DISK or not os.access(path, os.W_OK):
                raise
            raise DamagedSpoolError(f"{path.name}: {error}") from error

    def add(self, records: Iterable[SpooledRecord]) -> None:
        """All of them in one transaction, or none."""
        numbered = [replace(record, number=number) for number, record in enumerate(records, self._last + 1)]
        self._transaction(f"INSERT {_INTO}", [_row(record) for record in numbered])
        self._last += len(numbered)

    def restore(self, rows: Iterable[Row]) -> int:
        """Add rows as they are, each number once, in one transaction; how many there were."""
        return len(self._transaction(f"INSERT OR IGNORE {_INTO}", rows))

    def first(self, size: int) -> tuple[list[SpooledRecord], list[SpooledRecord]]:
        """The oldest records: as many as fit ``size`` bytes, and at least one where there is any.

        Apart from them those with another digest than they were written with, which are set aside by this.
        """
        found, damaged = list[SpooledRecord](), list[SpooledRecord]()
        rows = self._db.execute(
            "SELECT topic, key, value, number, digest FROM spooled WHERE refused IS NULL ORDER BY number"
        )
        for *fields, digest in rows:
            record = SpooledRecord(*fields)
            if not record.is_intact(digest):
                damaged.append(record)
                continue
            size -= len(record.value)
            if found and size < 0:
                break
            found.append(record)
        rows.close()
        for record in damaged:
            self.set_aside(record.number, f"{DAMAGED}its digest is another one")
        return found, damaged

    def remove(self, numbers: Sequence[int]) -> list[tuple[str, int]]:
        """Key and bytes of the rows that were there."""
        return self._transaction(_REMOVE, [(number,) for number in numbers])

    def set_aside(self, number: int, reason: str) -> bool:
        """Keep a record that is not to be sent out of the way of the others. False: it is not there."""
        return bool(self._transaction(_SET_ASIDE, [(reason, number)]))

    def shrink(self) -> None:
        """Give the space of removed records back to the disk."""
        self._db.execute("VACUUM")

    def contents(self) -> list[tuple[str, int, int]]:
        """Key, records and bytes of everything that waits to be sent."""
        query = "SELECT CAST(key AS TEXT), count(*), sum(length(value)) FROM spooled WHERE refused IS NULL GROUP BY 1"
        return list(self._db.execute(query))

    def damaged_rows(self) -> int:
        """Rows that were set aside because of their digest."""
        query = "SELECT count(*) FROM spooled WHERE refused LIKE ?"
        return int(self._db.execute(query, [f"{DAMAGED}%"]).fetchone()[0])

    def close(self) -> None:
        self.close_file()
        os.close(self.lock)

    def close_file(self) -> None:
        self._db.close()

    def _prepare(self) -> int:
        """The number of the last record that was written."""
        _check(self._db, self.path)
        self._db.execute("PRAGMA journal_mode = TRUNCATE").close()
        self._db.execute("PRAGMA synchronous = FULL")
        newest = self._db.execute("SELECT max(number) FROM spooled UNION ALL SELECT max(seq) FROM sqlite_sequence")
        return max(int(number or 0) for (number,) in newest)

    def _transaction(self, statement: str, rows: Iterable[tuple[object, ...]]) -> list[Any]:
        """Execute for each of the rows, all or none; what the statement returns of the rows that it has changed."""
        changed = list[Any]()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                changed += self._db.execute(statement, row).fetchall()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return changed


def _row(record: SpooledRecord) -> Row:
    return (record.number, record.topic, record.key, record.value, None, record.digest())


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
    return database


def _create(path: Path) -> None:
    """Made under another name, so that a file of its name always has its table: an empty one is a damaged one."""
    new = path.with_suffix(".create")
    new.unlink(missing_ok=True)
    with sqlite3.connect(new) as database:
        database.execute(TABLE)
    database.close()
    new.replace(path)
    sync_directory(path.parent)


def _check(database: sqlite3.Connection, path: Path) -> None:
    """Raises DamagedSpoolError; a file of release 0.1.0 gets the column that it has not."""
    verdict = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok" or not path.stat().st_size:
        raise DamagedSpoolError(f"{path.name}: {verdict if path.stat().st_size else 'the file is empty'}")
    columns = {name for _, name, *_ in database.execute("PRAGMA table_info(spooled)")}
    if not columns >= set(COLUMNS[:-1]):
        raise DamagedSpoolError(f"{path.name}: it has no table of records")
    database.execute("DELETE FROM spooled WHERE false")  # an altered header may make a file that takes no records
    if COLUMNS[-1] not in columns:
        database.execute("ALTER TABLE spooled ADD COLUMN digest BLOB")


def sync_directory(directory: Path) -> None:
    """Let what was renamed in it be there after a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
