"""The bounded spool: what Kafka does not take now, kept on the disk in order (rule S5).

The disk is touched in a thread of its own; records that come while one write is under way share the next one.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from rollmill.errors import BackpressureError, RetryableError
from rollmill_capture.event_log.spool_recovery import damaged_files, open_spool_store, replace_damaged
from rollmill_capture.event_log.spool_store import SpoolStore, is_damage
from rollmill_capture.event_log.spooled_record import SpooledRecord

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""How often the disk's free space is read."""


class SpoolFailedError(RetryableError):
    """The disk did not do what was asked of it; a record that was to be written is not there."""


class NoRoomError(BackpressureError):
    """What would have to be kept if Kafka went away now has no place."""


@dataclass(frozen=True)
class SpoolDamage:
    """What the disk has altered or lost: an operator has to look at it. Of this file, earlier processes included."""

    rows: int = 0
    """Set aside in the file, since they are not as they were written."""
    files: int = 0
    """Kept beside it."""
    saved: int = 0
    """Records that this process has read from damaged files."""


_Waiting = tuple[SpooledRecord, asyncio.Future[None]]


class Spool:
    """Opened by `open_spool`, closed by its owner. ``used`` and ``reserved`` are bytes."""

    def __init__(
        self,
        file: SpoolStore,
        thread: ThreadPoolExecutor,
        limit: int,
        free: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._thread = thread
        self._limit = limit
        self._free = free
        self._now = now
        self._capacity, self._checked_at = 0, float("-inf")
        self._counts: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        """Held while the file is used and the counts follow it."""
        self._sent: list[int] = []
        """Numbers of records that the log has, and that the disk did not remove yet."""
        self.empty = asyncio.Event()
        """Set while there is no record to be sent."""
        self.used = 0
        self.reserved = 0
        self.damage = SpoolDamage(saved=file.saved)
        self._broken: sqlite3.DatabaseError | None = None
        """Why the file has to be replaced, until that is done."""

    async def load(self) -> None:
        """Count what an earlier process left."""
        async with self._busy:
            await self._run(lambda file: file.contents())
            await self._recount()

    @property
    def records(self) -> int:
        return self._counts.total()

    def holds(self, key: str) -> bool:
        """Whether records of the key are spooled; later ones have to go behind them."""
        return key in self._counts

    @property
    def free(self) -> int:
        """Bytes that can be kept for calls now."""
        return self._max_bytes() - self.used - self.reserved

    @contextmanager
    def reserve_space(self, size: int) -> Iterator[None]:
        """Inside, ``size`` bytes are kept free. Raises NoRoomError."""
        limit = self._max_bytes()
        if self.used + self.reserved + size > limit:
            raise NoRoomError(
                f"the spool has no room for {size} bytes: {self.used} of {limit} are used and {self.reserved} reserved "
                "for calls in flight (ROLLMILL_SPOOL_BYTES, or the disk's free space; `max_tokens` bounds what a call "
                "reserves)",
                retry_after=5,
            )
        self.reserved += size
        try:
            yield
        finally:
            self.reserved -= size

    def _max_bytes(self) -> int:
        """Bytes that records may take together: the limit, or what the disk has left where that is less."""
        if self._now() >= self._checked_at + CHECK_SECONDS:
            self._capacity, self._checked_at = self.used + self._free(), self._now()
        return min(self._limit, self._capacity)

    async def put(self, record: SpooledRecord) -> None:
        """Returns when the record is on the disk: what has its room is never refused. Raises SpoolFailedError."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count(record.key, len(record.value), 1)
        self._waiting.append((record, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await written

    async def first(self, size: int) -> list[SpooledRecord]:
        """The oldest records that are as they were written, about ``size`` bytes of them; empty: there is none.

        Those that are not are set aside. Raises SpoolFailedError.
        """
        async with self._usable():
            await self._remove_sent()
            found, damaged = await self._run(lambda file: file.first(size))
            if damaged:
                _log_damaged(damaged)
                await self._recount()
            return found

    async def remove(self, records: Sequence[SpooledRecord]) -> None:
        """Remove records that the log has. Raises SpoolFailedError: not yet, and they are not given out again."""
        async with self._usable():
            self._sent += [record.number for record in records]
            await self._remove_sent()

    async def set_aside(self, record: SpooledRecord, reason: str) -> None:
        """Keep a record that the log will never take out of the way; it stays in the file for an operator."""
        async with self._usable():
            if await self._run(lambda file: file.set_aside(record.number, reason)):
                self._count(record.key, len(record.value), -1)

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        await self._in_thread(self._file.close)
        self._thread.shutdown()

    async def _remove_sent(self) -> None:
        if not self._sent:
            return
        for key, size in await self._run(lambda file: file.remove(self._sent)):
            self._count(key, size, -1)
        self._sent = []
        if not self._counts:
            await self._shrink()

    async def _shrink(self) -> None:
        try:
            await self._run(lambda file: file.shrink())
        except sqlite3.Error as error:
            structlog.get_logger().warning("the spool's file keeps the space of removed records", error=str(error))

    async def _write(self) -> None:
        """Write until nothing waits; whatever came during one write goes with the next."""
        while self._waiting:
            async with self._busy:
                await self._write_batch()
        self._writing = None
        self._update_empty()

    async def _write_batch(self) -> None:
        batch, self._waiting = self._waiting, []
        records = [record for record, _ in batch]
        try:
            await self._run(lambda file: file.add(records), batch)
        except Exception as error:  # noqa: BLE001  # whatever it is, the waiting callers have to get it
            self._fail(batch, error)
        else:
            for _, written in batch:
                if not written.done():
                    written.set_result(None)

    def _fail(self, batch: Sequence[_Waiting], error: Exception) -> None:
        for record, written in batch:
            self._count(record.key, len(record.value), -1)
            if not written.done():
                written.set_exception(SpoolFailedError(f"the spool's disk did not take the record: {error!r}"))

    def _count(self, key: str, size: int, by: int) -> None:
        self.used += by * size
        self._counts[key] += by
        if not self._counts[key]:
            del self._counts[key]
        self._update_empty()

    async def _recount(self, writing: Sequence[_Waiting] = ()) -> None:
        """Count again what the file holds, and what is on its way there."""
        path = self._file.path
        contents, rows, files = await self._in_thread(
            lambda: (self._file.contents(), self._file.damaged_rows(), damaged_files(path))
        )
        self.damage = replace(self.damage, rows=rows, files=files)
        self._counts.clear()
        self.used = 0
        for record, _ in (*writing, *self._waiting):
            contents.append((record.key, 1, len(record.value)))
        for key, count, size in contents:
            self._counts[key] += count
            self.used += size
        self._update_empty()

    def _update_empty(self) -> None:
        if self._counts:
            self.empty.clear()
        else:
            self.empty.set()

    @asynccontextmanager
    async def _usable(self) -> AsyncIterator[None]:
        async with self._busy:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                raise SpoolFailedError(f"the spool's disk fails: {error!r}") from error

    async def _run(self, work: Callable[[SpoolStore], T], writing: Sequence[_Waiting] = ()) -> T:
        """Use the file; once more where it proved to be damaged, and a new one has taken its place."""
        if self._broken is None:
            try:
                return await self._in_thread(lambda: work(self._file))
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._broken = error
        await self._in_thread(partial(self._replace_file, self._broken))
        self._broken = None
        await self._recount(writing)
        return await self._in_thread(lambda: work(self._file))

    def _replace_file(self, damage: sqlite3.DatabaseError) -> None:
        path, lock = self._file.path, self._file.lock
        self._file.close_file()
        self._file = replace_damaged(path, lock, damage)
        self.damage = replace(self.damage, saved=self.damage.saved + self._file.saved)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _log_damaged(records: Sequence[SpooledRecord]) -> None:
    for record in records:
        structlog.get_logger().error(
            "a spooled record is not what was written: it is set aside in the spool's file and not sent",
            number=record.number,
            topic=record.topic,
            session=record.key,
            bytes=len(record.value),
        )


async def open_spool(directory: Path, prefix: str, limit: int) -> Spool:
    """The spool in ``directory``, with what an earlier process left in it. Raises ConfigurationError."""
    thread = ThreadPoolExecutor(1, "rollmill-spool")
    loop = asyncio.get_running_loop()
    file = await loop.run_in_executor(thread, open_spool_store, directory, prefix)
    spool = Spool(file, thread, limit, lambda: shutil.disk_usage(directory).free)
    await spool.load()
    return spool
