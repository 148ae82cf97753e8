"""Where events go: to the log, or to the spool while the log is away; acknowledged by one of them (rule S5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from rollmill.codec import Headers
from rollmill.errors import BackpressureError
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import Topic
from rollmill_capture.event_log.producer import NotAcknowledgedError, RefusedRecordError
from rollmill_capture.event_log.spool import Spool, SpoolFailedError
from rollmill_capture.event_log.spool_store import SpooledRecord

__all__ = ["EventWriter", "LogEventWriter", "NotAcknowledgedError"]

DRAIN_BYTES = 4 * 2**20
"""Sent from the spool at once."""
RETRY_SECONDS = 1.0
STUCK_AFTER = 3
"""A producer that fails this often in a row while the broker answers is finished, whatever it says."""


class EventWriter(Protocol):
    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        """Append a record; returns once it is acknowledged. Raises NotAcknowledgedError.

        To be called inside ``room``; a spool refuses nothing then but for a failing disk.
        """
        ...

    async def append_best_effort(self, topic: Topic, key: str, value: bytes | None, headers: Headers = ()) -> None:
        """Append a record, or a tombstone, that loses its meaning with time: to the log or not at all, never spooled.

        Raises NotAcknowledgedError.
        """
        ...

    def reserve_space(self, size: int) -> AbstractContextManager[None]:
        """Inside, there is a place for one record of ``size`` bytes, whatever becomes of Kafka (rule S5).

        Raises BackpressureError where there is none.
        """
        ...


class Log(Protocol):
    """Kafka, as the event writer needs it: `rollmill_capture.event_log.producer.KafkaLog` is one."""

    async def send(self, topic: str, key: str, value: bytes) -> None: ...

    async def send_all(self, records: list[tuple[str, str, bytes]]) -> None: ...

    async def append_best_effort(self, topic: str, key: str, value: bytes | None, headers: Headers = ()) -> None: ...

    async def answers(self) -> bool: ...

    async def replace(self) -> None: ...


class LogAwayError(BackpressureError):
    """Kafka is away, and there is no spool."""


@dataclass
class LogEventWriter:
    """Sends to the log while that answers. ``drain`` has to run beside it: it sends what was spooled."""

    log: Log
    spool: Spool | None
    metrics: Metrics
    away: bool = False
    """Kafka did not acknowledge, and nothing has been acknowledged since."""
    failpoints: Failpoints = field(default_factory=Failpoints)
    _noticed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there may be something to do for ``drain``."""

    def __post_init__(self) -> None:
        if self.spool is not None and self.spool.records:
            self._noticed.set()

    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        self.failpoints.reach(Failpoint.CAPTURE_BEFORE_ACKNOWLEDGEMENT)
        await self._append(topic, key, value)
        self.failpoints.reach(Failpoint.CAPTURE_AFTER_ACKNOWLEDGEMENT)

    async def _append(self, topic: Topic, key: str, value: bytes) -> None:
        spool = self.spool
        if spool is not None and (self.away or spool.holds(key)):
            await self._put(spool, SpooledRecord(topic.name, key, value))
            return
        try:
            await self.log.send(topic.name, key, value)
        except RefusedRecordError:
            raise
        except NotAcknowledgedError as error:
            self._lose(error)
            if spool is None:
                raise
            await self._put(spool, SpooledRecord(topic.name, key, value))
        else:
            self._wrote(topic.name)

    async def append_best_effort(self, topic: Topic, key: str, value: bytes | None, headers: Headers = ()) -> None:
        if self.away or (self.spool is not None and self.spool.holds(key)):
            raise NotAcknowledgedError("Kafka is away")
        try:
            await self.log.append_best_effort(topic.name, key, value, headers)
        except NotAcknowledgedError as error:
            self._lose(error)
            raise
        self._wrote(topic.name)

    @contextmanager
    def reserve_space(self, size: int) -> Iterator[None]:
        """Kept while Kafka is well, too: it may go away before the record comes."""
        if self.spool is None:
            self._need_the_log()
            yield
            return
        with self.spool.reserve_space(size):
            yield

    async def drain(self) -> None:
        """Send what is spooled, for ever; ask for a log that was away whether it is back."""
        failures = 0
        while True:
            await self._noticed.wait()
            if await self._step():
                failures = 0
                continue
            failures += 1
            if failures >= STUCK_AFTER and await self.log.answers():
                await self.log.replace()
                failures = 0
            await asyncio.sleep(RETRY_SECONDS)

    async def emptied(self, seconds: float | None = None) -> bool:
        """Wait until nothing is spooled; False: ``seconds`` were over before."""
        if self.spool is None:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self.spool.empty.wait()
        except TimeoutError:
            return False
        return True

    async def _step(self) -> bool:
        """Send the oldest records. False: the log is still away."""
        batch = [] if self.spool is None else await self.spool.first(DRAIN_BYTES)
        if not batch or self.spool is None:
            return await self._look()
        try:
            await self.log.send_all([(record.topic, record.key, record.value) for record in batch])
        except RefusedRecordError:
            await self._one_by_one(self.spool, batch)
        except NotAcknowledgedError as error:
            self._lose(error)
            return False
        else:
            self._find()
            for record in batch:
                self._wrote(record.topic)
            await self.spool.remove(batch)
        self._show(self.spool)
        return True

    async def _look(self) -> bool:
        """Nothing to send: ask for the log, and rest where it is there."""
        if self.away and not await self.log.answers():
            return False
        self._find()
        if self.spool is None or self.spool.empty.is_set():
            self._noticed.clear()
        return True

    async def _one_by_one(self, spool: Spool, batch: list[SpooledRecord]) -> None:
        for record in batch:
            try:
                await self.log.send(record.topic, record.key, record.value)
            except RefusedRecordError as error:
                structlog.get_logger().error("a spooled record is set aside", key=record.key, error=str(error))
                self.metrics.count("spooled_records_set_aside")
                await spool.set_aside(record, str(error))
            except NotAcknowledgedError:
                return
            else:
                self._wrote(record.topic)
                await spool.remove([record])

    async def _put(self, spool: Spool, record: SpooledRecord) -> None:
        try:
            await spool.put(record)
        except SpoolFailedError as error:
            raise NotAcknowledgedError(f"Kafka is away, and {error}") from error
        self._noticed.set()
        self.metrics.count("spooled_records")
        self._show(spool)

    def _need_the_log(self) -> None:
        if self.away:
            raise LogAwayError("Kafka is away, and no spool is configured (ROLLMILL_SPOOL_DIR)", retry_after=5)

    def _lose(self, error: Exception) -> None:
        if not self.away:
            structlog.get_logger().error("Kafka is away", error=str(error), spooling=self.spool is not None)
        self.away = True
        self._noticed.set()
        self.metrics.gauge("kafka_away", 1)

    def _find(self) -> None:
        if self.away:
            structlog.get_logger().info("Kafka is back")
        self.away = False
        self.metrics.gauge("kafka_away", 0)

    def _wrote(self, topic: str) -> None:
        self.metrics.count("written_records", topic=topic)

    def _show(self, spool: Spool) -> None:
        self.metrics.gauge("spool_bytes", spool.used)
        self.metrics.gauge("spool_records", spool.records)
