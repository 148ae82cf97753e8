"""The bounded spool: what Kafka does not take now, kept on the disk in order (rule S5).

The disk is touched in a thread of its own; records that come while one write is under way share the next one.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from rollmill.errors import BackpressureError, RetryableError
from rollmill_capture.event_log.spool_store import SpooledRecord, SpoolStore, open_spool_store

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""How often the disk's free space is read."""


class SpoolFailedError(RetryableError):
    """The disk did not take a record."""


class NoRoomError(BackpressureError):
    """What would have to be kept if Kafka went away now has no place."""


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
        self._waiting: list[tuple[SpooledRecord, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self.empty = asyncio.Event()
        """Set while there is no record to be sent."""
        self.used = 0
        self.reserved = 0

    async def load(self) -> None:
        """Count what an earlier process left."""
        for key, count, size in await self._run(self._file.contents):
            self._counts[key] += count
            self.used += size
        self._update_empty()

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
        self._count(record, 1)
        self._waiting.append((record, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await written

    async def first(self, size: int) -> list[SpooledRecord]:
        """The oldest records, about ``size`` bytes of them; empty: there is none."""
        return await self._run(partial(self._file.first, size))

    async def remove(self, records: Sequence[SpooledRecord]) -> None:
        """Remove records that the log has."""
        await self._run(partial(self._file.remove, [record.number for record in records]))
        for record in records:
            self._count(record, -1)
        if not self._counts:
            await self._run(self._file.shrink)

    async def set_aside(self, record: SpooledRecord, reason: str) -> None:
        """Keep a record that the log will never take out of the way; it stays in the file for an operator."""
        await self._run(partial(self._file.set_aside, record.number, reason))
        self._count(record, -1)

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        await self._run(self._file.close)
        self._thread.shutdown()

    async def _write(self) -> None:
        """Write until nothing waits; whatever came during one write goes with the next."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._run(partial(self._file.add, [record for record, _ in batch]))
            except Exception as error:  # noqa: BLE001  # whatever it is, the waiting callers have to get it
                self._fail(batch, error)
            else:
                for _, written in batch:
                    if not written.done():
                        written.set_result(None)
        self._writing = None
        self._update_empty()

    def _fail(self, batch: list[tuple[SpooledRecord, asyncio.Future[None]]], error: Exception) -> None:
        for record, written in batch:
            self._count(record, -1)
            if not written.done():
                written.set_exception(SpoolFailedError(f"the spool's disk did not take the record: {error!r}"))

    def _count(self, record: SpooledRecord, by: int) -> None:
        self.used += by * len(record.value)
        self._counts[record.key] += by
        if not self._counts[record.key]:
            del self._counts[record.key]
        self._update_empty()

    def _update_empty(self) -> None:
        if self._counts:
            self.empty.clear()
        else:
            self.empty.set()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def open_spool(directory: Path, prefix: str, limit: int) -> Spool:
    """The spool in ``directory``, with what an earlier process left in it. Raises ConfigurationError."""
    thread = ThreadPoolExecutor(1, "rollmill-spool")
    loop = asyncio.get_running_loop()
    file = await loop.run_in_executor(thread, open_spool_store, directory, prefix)
    spool = Spool(file, thread, limit, lambda: shutil.disk_usage(directory).free)
    await spool.load()
    return spool
