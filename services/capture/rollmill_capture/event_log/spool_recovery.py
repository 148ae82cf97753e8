"""Opens the spool's file for its owner, and replaces a damaged one by a new file with the rows that could be saved.

One process owns a file, by a lock beside it. The next start takes the first file without an owner, so that what a dead
process left is found again; a directory serves the replicas of one machine. A damaged file is kept under another name.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import structlog

from rollmill.errors import ConfigurationError
from rollmill_capture.event_log.spool_salvage import FoundRow, open_damaged
from rollmill_capture.event_log.spool_store import DAMAGED, Row, SpoolStore, is_damage, sync_directory
from rollmill_capture.event_log.spooled_record import SpooledRecord

MOST_FILES = 1024
MOST_RECORDS = 2**62
"""No number is larger, so that a damaged one leaves room for those after it."""


def open_spool_store(directory: Path, prefix: str) -> SpoolStore:
    """The first file of the prefix that no running process owns. Raises ConfigurationError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_FILES):
            path = directory / f"{prefix}{number}.sqlite"
            lock = _locked(path.with_suffix(".lock"))
            if lock is not None:
                return _open(path, lock)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"the spool in {directory} cannot be used: {error}; set ROLLMILL_SPOOL_DIR") from error
    raise ConfigurationError(f"all {MOST_FILES} spool files in {directory} are in use")


def replace_damaged(path: Path, lock: int, error: sqlite3.Error) -> SpoolStore:
    """A new file in place of a closed one that is damaged, with every row that can be read. Raises sqlite3's errors.

    Until the new file is complete the damaged one keeps its name, so that a crash in between loses nothing.
    """
    new, kept = path.with_suffix(".new"), path.with_suffix(f".damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    new.unlink(missing_ok=True)
    saved, altered, unreadable = _save(path, new)
    path.rename(kept)
    for journal in ("-journal", "-wal"):
        left = path.with_name(path.name + journal)
        if left.exists():
            left.rename(kept.with_name(kept.name + journal))
    new.replace(path)
    sync_directory(path.parent)
    structlog.get_logger().error(
        "the spool's file is damaged: its readable records are sent, others may be lost; the file is kept for a look",
        error=str(error),
        kept=str(kept),
        records_saved=saved,
        records_altered=altered,
        rows_unreadable=unreadable,
    )
    store = SpoolStore(path, lock)
    store.saved = saved
    return store


def damaged_files(path: Path) -> int:
    """Damaged files that were kept of the one of this name."""
    journals = ("-journal", "-wal")
    return sum(not kept.name.endswith(journals) for kept in path.parent.glob(f"{path.stem}.damaged-*"))


def _open(path: Path, lock: int) -> SpoolStore:
    new = path.with_suffix(".new")
    if new.exists() and not path.exists():
        new.replace(path)  # an earlier start was ended between the two names; the new file was complete
    try:
        return SpoolStore(path, lock)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        return replace_damaged(path, lock, error)


def _save(path: Path, new: Path) -> tuple[int, int, int]:
    """Fill a new file: rows that are as written, rows that are not, and cells that are no row."""
    with path.open("rb") as file:
        damaged = open_damaged(file, path)
        store = SpoolStore(new, os.open(os.devnull, os.O_RDONLY))
        try:
            saved = store.restore(row for row in map(_row, damaged.rows()) if row is not None and row[0] > 0)
            altered = store.restore(row for row in _numbered_down(damaged.rows()))
        finally:
            store.close()
        return saved, altered, sum(1 for found in damaged.rows() if found is None)


def _numbered_down(found: Iterator[FoundRow | None]) -> Iterator[Row]:
    """Altered rows, under negative numbers: their own may be another's."""
    altered = (row for row in map(_row, found) if row is not None and row[0] < 0)
    for number, row in enumerate(altered, 1):
        yield (-number, *row[1:])


def _row(found: FoundRow | None) -> Row | None:
    """A row of records, with a negative number where it is not what was written; None: it is of another table."""
    match found:
        case FoundRow(number, [None, str(topic), str(key), bytes(value), (str() | None) as refused, *more]):
            digest = more[0] if more else None
            if 0 < number < MOST_RECORDS and SpooledRecord(topic, key, value, number).is_intact(digest):
                return (number, topic, key, value, refused, digest if isinstance(digest, bytes) else None)
            return (-1, topic, key, value, f"{DAMAGED}found in a damaged file, its digest is another one", None)
        case _:
            return None


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None: another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
